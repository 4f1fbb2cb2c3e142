"""A model's sizes, from its config: no weight is read, downloaded or made."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    import torch

PUBLIC = Path(__file__).with_name("public_models.json")
"""Configs of the models that `conf/model/` names, for machines that cannot reach the hub."""


@dataclass(frozen=True)
class Shape:
    """config: transformers'. source: where it was found. All else are numbers of parameters, but `layers`.

    trained: those that take a gradient. layer: of the largest decoder layer. embedding: of the input embedding,
    which is looked up and not multiplied with. head: of the output head; tied: they are one. adapter: of LoRA.
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

    @property
    def outside(self) -> int:
        """Parameters of no decoder layer: embedding, head, norms."""
        return self.parameters - self.layers * self.layer

    @property
    def multiplied(self) -> int:
        """Parameters of matrix products in a decoder, without embedding and head."""
        return self.parameters - self.embedding - (0 if self.tied else self.head)

    @property
    def cache_per_token(self) -> int:
        """Numbers that the KV cache holds for a token."""
        text = self.config.get_text_config()
        return int(2 * self.layers * text.num_key_value_heads * self.head_size)

    @property
    def attention_width(self) -> int:
        """Heads times their size."""
        return int(self.config.get_text_config().num_attention_heads) * self.head_size

    @property
    def head_size(self) -> int:
        text = self.config.get_text_config()
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def find_shape(part: Any) -> Shape:
    """The sizes of the run's choice of `model`. Raises ConfigError, naming the key, where its config cannot be had."""
    config, source = find_config(part)
    model = empty_model(config, part)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapter = trained if part.lora.rank else 0
    layers = decoder_layers(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Shape(
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
    )


def empty_model(config: Any, part: Any) -> Any:
    """The model on torch's meta device, which has shapes and no numbers, with LoRA's updates where they are asked.

    Raises ConfigError where transformers has no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from grpocli.models.loading import without_dropout
    from grpocli.models.lora import inject

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="eager" if part.attn_implementation == "eager" else "sdpa",
                trust_remote_code=getattr(part, "trust_remote_code", False),
            )
            return inject(without_dropout(model), part.lora) if part.lora.rank else without_dropout(model)
    except (ValueError, ImportError, OSError) as error:
        problem = f"transformers cannot make a model of its config: {str(error).splitlines()[0]}"
        raise ConfigError(problem, key="model.path", value=getattr(part, "path", "")) from error


def with_layers(config: Any, layers: int) -> Any:
    """The same config with the first decoder layers only."""
    smaller = deepcopy(config)
    text = smaller.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return smaller


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The blocks that a decoder repeats."""
    import torch

    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return list(lists[0])


def find_config(part: Any) -> tuple[Any, str]:
    """transformers' config of the run's choice of `model`, and where it is from."""
    from grpocli.models.tiny import Tiny

    if isinstance(part, Tiny):
        from grpocli.models.tiny import make_model

        return make_model(0).config, "built in"
    path = str(getattr(part, "path", "")) or str(part.prepare())
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                "the folder has no config.json, from which alone a plan is made", key="model.path", value=path
            )
        return _load(part, str(folder)), f"{path}/config.json"
    return _of_the_hub(part, path)


def _of_the_hub(part: Any, name: str) -> tuple[Any, str]:
    """What was downloaded before; else the sizes that come with grpocli; else the hub, which nothing else asks."""
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
