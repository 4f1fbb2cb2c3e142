"""Numbers of parameters of a model, from its config alone: no weights are read, downloaded or allocated."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.hub import PREFIX, model_folder
from grpocli.training.optim import matrices_in_layers

if TYPE_CHECKING:
    import torch

EXPERTS = ".experts."
PUBLIC = Path(__file__).with_name("public_models.json")
"""Configs of the models in `conf/model/`, for machines that cannot reach the hub."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of a model.

    config: the config of transformers. source: where it was found. trained: parameters with a gradient. layers:
    decoder layers. layer: parameters of the largest one. embedding: of the input embedding. head: of the output head.
    tied: embedding and head are one matrix. adapter: parameters of LoRA. trained_shapes: of the parameters with a
    gradient, and whether each is a matrix between embedding and head. quantized: parameters of 4 bits. widest: those of
    the largest layer with such ones. idle: parameters of experts that a token does not go to.
    experts: of all experts. moved: numbers that the products in the decoder layers read and write for a token.
    adapted: the same of the layers that LoRA adds to.
    """

    config: Any
    source: str
    parameters: int
    trained: int
    layers: int
    layer: int
    embedding: int
    head: int
    tied: bool
    adapter: int
    trained_shapes: tuple[tuple[tuple[int, ...], bool], ...] = ()
    quantized: int = 0
    widest: int = 0
    idle: int = 0
    experts: int = 0
    moved: int = 0
    adapted: int = 0

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
        """Heads of keys and values."""
        return int(self.config.get_text_config().num_key_value_heads)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def attention_width(self) -> int:
        """Heads times head size."""
        return self.heads * self.head_size

    @property
    def head_size(self) -> int:
        text = self.config.get_text_config()
        return int(getattr(text, "head_dim", None) or text.hidden_size // self.heads)


def find_model_size(part: Any) -> ModelSize:
    """The size of a choice of `model`. Raises ConfigError, naming the key, if its config is not available."""
    config, source = find_config(part)
    model = empty_model(config, part)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapter = trained if part.lora.rank else 0
    layers, matrices = decoder_layers(model), matrices_in_layers(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return ModelSize(
        config=config,
        source=source,
        parameters=parameters,
        trained=trained,
        layers=len(layers),
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        embedding=embedding.numel(),
        head=head.numel(),
        tied=head is embedding,
        adapter=adapter,
        quantized=sum(layer.weight.numel() for layer in quantized_linear(model, part)),
        widest=max((layer.weight.numel() for layer in quantized_linear(model, part)), default=0),
        idle=_idle(model),
        experts=sum(p.numel() for name, p in model.named_parameters() if EXPERTS in name),
        moved=_moved(layers, model.config),
        adapted=_adapted(layers),
        trained_shapes=tuple(
            (tuple(p.shape), name in matrices) for name, p in model.named_parameters() if p.requires_grad
        ),
    )


def _idle(model: Any) -> int:
    """Parameters of experts that a token does not go to. Transformers keeps all experts of a layer in one tensor."""
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if chosen is None:
        return 0
    experts = [p for name, p in model.named_parameters() if EXPERTS in name]
    return sum(p.numel() - p.numel() // len(p) * chosen for p in experts)


def _moved(layers: list[torch.nn.Module], config: Any) -> int:
    """Inputs and outputs of the products of all layers for one token, which goes to few of the experts."""
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1
    weights = [
        (name, p) for layer in layers for name, p in layer.named_parameters() if p.dim() >= 2 and "lora_" not in name
    ]
    return sum(sum(p.shape[-2:]) * (chosen if EXPERTS in f".{name}" else 1) for name, p in weights)


def _adapted(layers: list[torch.nn.Module]) -> int:
    """Inputs and outputs, for one token, of the layers with LoRA's updates: A is [rank, in], B [out, rank]."""
    updates = [(name, p) for layer in layers for name, p in layer.named_parameters() if "lora_" in name]
    return sum(p.shape[1] if "lora_A" in name else p.shape[0] for name, p in updates)


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
    from grpocli.models.lora import inject

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="eager" if part.attention == "eager" else "sdpa",
                trust_remote_code=getattr(part, "trust_remote_code", False),
            )
            model = with_head(part, without_dropout(model))
            return inject(model, part.lora) if part.lora.rank else model
    except (ValueError, ImportError, OSError) as error:
        problem = f"transformers cannot build a model from its config: {str(error).splitlines()[0]}"
        raise ConfigError(problem, key="model.path", value=getattr(part, "path", "")) from error


def with_layers(config: Any, layers: int) -> Any:
    """The config with only the first decoder layers."""
    smaller = deepcopy(config)
    text = smaller.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return smaller


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers of a model."""
    import torch

    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return list(lists[0])


def find_config(part: Any) -> tuple[Any, str]:
    """The transformers config of a choice of `model`, and where it was found."""
    from grpocli.models.tiny import Tiny

    if isinstance(part, Tiny):
        from grpocli.models.tiny import make_model

        return make_model(0).config, "built in"
    path = str(getattr(part, "path", "")) or str(part.prepare())
    if path.startswith(PREFIX):
        return _load(part, model_folder(path, "model.path", part.revision)), path
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError("the folder has no config.json, which a plan is made from", key="model.path", value=path)
        return _load(part, str(folder)), f"{path}/config.json"
    return _of_the_hub(part, path)


def _of_the_hub(part: Any, name: str) -> tuple[Any, str]:
    """The downloaded config, else the config shipped with grpocli, else the hub's."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True), "downloaded before"
    except (OSError, ValueError):
        known = json.loads(PUBLIC.read_text())
    if name in known:
        return AutoConfig.for_model(**known[name]), "the model's public sizes, which come with grpocli"
    part.prepare()  # its ConfigError names a wrong folder, or a hub that does not answer
    try:
        return _load(part, name), "the hub"
    except ConfigError as error:
        problem = (
            "is not on this machine, and the hub does not answer or has no such model; for a plan, a folder with the "
            "model's config.json is enough: model=hf model.path=FOLDER"
        )
        raise ConfigError(problem, key="model.path", value=name) from error


def _load(part: Any, path: str) -> Any:
    from grpocli.models.loading import load_config

    return load_config(part, path)
