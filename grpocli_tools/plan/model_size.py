"""Numbers of parameters of a model, from its config alone: no weights are read, downloaded or allocated."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import config_errors
from grpocli.hub import PREFIX, model_folder
from grpocli.training.optim import matrices_in_layers

if TYPE_CHECKING:
    import torch

EXPERTS = ".experts."
PUBLIC = Path(__file__).with_name("public_models.json")
"""Configs of the models in `conf/model/`, for machines that cannot reach the hub."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of a model."""

    config: Any
    """That of transformers."""
    source: str
    """Where the config was found."""
    parameters: int
    trained: int
    """Those with a gradient."""
    trained_shapes: tuple[tuple[tuple[int, ...], bool], ...]
    """Their shapes, and whether each is a matrix between embedding and head."""
    layers: int
    """Decoder layers."""
    layer: int
    """Of the largest layer."""
    embedding: int
    head: int
    tied: bool
    """Embedding and head are one matrix."""
    adapter: int
    """Of LoRA."""
    quantized: int
    """Those of 4 bits."""
    widest: int
    """Of the largest layer with parameters of 4 bits."""
    experts: int
    """Of all experts."""
    idle: int
    """Of the experts that a token does not go to."""
    moved: int
    """Numbers that the products in the decoder layers read and write for a token."""
    adapted: int
    """The same of the layers that LoRA adds to."""

    @property
    def outside(self) -> int:
        """Parameters outside of decoder layers: embedding, head, norms."""
        return self.parameters - self.layers * self.layer

    @property
    def multiplied(self) -> int:
        """Parameters in matrix products of the decoder, without embedding and head."""
        return self.parameters - self.embedding - (0 if self.tied else self.head)

    @property
    def multiplied_by_a_token(self) -> int:
        """Of these, without the experts that a token does not go to."""
        return self.multiplied - self.idle

    @property
    def cache_per_token(self) -> int:
        """Numbers in the KV cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_size

    @property
    def heads(self) -> int:
        return int(self.config.get_text_config().num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(self.config.get_text_config().num_key_value_heads)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def head_size(self) -> int:
        text = self.config.get_text_config()
        return int(getattr(text, "head_dim", None) or text.hidden_size // self.heads)


def find_model_size(part: Any) -> ModelSize:
    """The size of a choice of `model`. Raises ConfigError, naming the key, if its config is not available."""
    config, source = find_config(part)
    model = empty_model(config, part)
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    n_trained = sum(p.numel() for p in trained.values())
    layers, matrices = decoder_layers(model), matrices_in_layers(model)
    experts = [p for name, p in named.items() if EXPERTS in name]
    quantized = [layer.weight.numel() for layer in quantized_linear(model, part)]
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # transformers keeps all experts of a layer in one tensor; a token goes to some of them
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    in_layers = [(f".{name}", p) for layer in layers for name, p in layer.named_parameters()]
    products = [
        sum(p.shape[-2:]) * ((chosen or 1) if EXPERTS in name else 1)
        for name, p in in_layers
        if p.dim() >= 2 and "lora_" not in name
    ]
    # A is [rank, in], B [out, rank]
    updates = [p.shape[1] if "lora_A" in name else p.shape[0] for name, p in in_layers if "lora_" in name]
    return ModelSize(
        config=config,
        source=source,
        parameters=sum(p.numel() for p in named.values()),
        trained=n_trained,
        trained_shapes=tuple((tuple(p.shape), name in matrices) for name, p in trained.items()),
        layers=len(layers),
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        embedding=embedding.numel(),
        head=head.numel(),
        tied=head is embedding,
        adapter=n_trained if part.lora.rank else 0,
        quantized=sum(quantized),
        widest=max(quantized, default=0),
        experts=sum(p.numel() for p in experts),
        idle=sum(p.numel() - p.numel() // len(p) * chosen for p in experts) if chosen else 0,
        moved=sum(products),
        adapted=sum(updates),
    )


def quantized_linear(model: Any, part: Any) -> list[torch.nn.Linear]:
    """The layers of a model without numbers that model.quantization gives weights of 4 bits."""
    import torch

    if not getattr(part, "quantization", None):
        return []
    head = model.get_output_embeddings()
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [module for name, module in linear if module is not head and ".lora_" not in name]


def empty_model(config: Any, part: Any) -> Any:
    """The model on torch's meta device, which holds shapes without numbers; with LoRA's updates if the config asks.

    Raises ConfigError if transformers cannot build it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from grpocli.models.loading import with_head, without_dropout
    from grpocli.models.lora import attach

    kinds, says = (ValueError, ImportError, OSError), "transformers cannot build a model from its config: {}"
    path = getattr(part, "path", "")
    with config_errors(*kinds, says=says, key="model.path", value=path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager" if part.attention == "eager" else "sdpa",
            trust_remote_code=getattr(part, "trust_remote_code", False),
        )
        model = with_head(part, without_dropout(model))
        return attach(model, part.lora, seed=0) if part.lora.rank else model


def with_layers(config: Any, layers: int) -> Any:
    smaller = deepcopy(config)
    text = smaller.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return smaller


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    import torch

    count = model.config.get_text_config().num_hidden_layers
    return list(next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count))


def find_config(part: Any) -> tuple[Any, str]:
    """The transformers config of a choice of `model`, and where it was found.

    A name on the hub is looked for among downloaded models, in `PUBLIC`, and at last on the hub.
    """
    from transformers import AutoConfig

    from grpocli.models.loading import load_config
    from grpocli.models.tiny import Tiny, make_model

    if isinstance(part, Tiny):
        return make_model(0).config, "built in"
    path = str(getattr(part, "path", "")) or str(part.prepare())
    if path.startswith(PREFIX):
        return load_config(part, model_folder(path, "model.path", part.revision)), path
    if (folder := Path(path).expanduser()).is_dir():
        return load_config(part, str(folder)), f"{path}/config.json"
    with suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(path, local_files_only=True), "downloaded before"
    if path in (known := json.loads(PUBLIC.read_text())):
        return AutoConfig.for_model(**known[path]), "the model's public sizes, which come with grpocli"
    part.prepare()  # its ConfigError names a wrong folder, or a hub that does not answer
    return load_config(part, path), "the hub"
