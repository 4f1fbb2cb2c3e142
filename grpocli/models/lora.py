"""LoRA: a frozen base model, and small trained updates to its weights (arXiv 2106.09685).

    W' = W + (alpha / rank) B A        W [out, in], B [out, rank] starts at 0, A [rank, in] at random

peft's layers are put into the model in place, so it stays a model of transformers with its own class, config and
cache; only its parameters have other names. `merged` gives them under their own.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import require, section
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ADAPTER = "default"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of the names in adapter files, as every reader of them expects."""


@section("model.lora")
class Lora:
    """Low-rank updates of linear layers, LoRA (arXiv 2106.09685); without dropout, which the sampler lacks too."""

    rank: int = 0
    """Rank of the updates; 0: train all weights instead."""
    alpha: float = 32.0
    """The updates are scaled by alpha / rank."""
    target_modules: Any = "all-linear"
    """Layers with updates: `all-linear` (every linear layer but the output head), a list of module names such as
    [q_proj,v_proj], or a regular expression that whole names match."""

    def __post_init__(self) -> None:
        require(self, "rank", self.rank >= 0, "must be 0 (train all weights) or more")
        require(self, "alpha", 0 < self.alpha < math.inf, "must be a finite number above 0")
        names = [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules
        ok = isinstance(names, list) and bool(names) and all(isinstance(n, str) and n for n in names)
        require(self, "target_modules", ok, "give all-linear, a list of module names, or a regular expression")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ConfigError(
                    f"is no regular expression: {error}", key="model.lora.target_modules", value=self.target_modules
                ) from error


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> PreTrainedModel:
    """The same model with its weights frozen and an update, still 0, beside each targeted one.

    A is a function of `seed` alone. Raises ConfigError, naming the key, where nothing can be targeted.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject(model, lora)
    _refuse_tied(model, lora)
    return model


def inject(model: PreTrainedModel, lora: Lora) -> PreTrainedModel:
    """`attach` for a model that may have shapes and no numbers: what needs their addresses is not checked."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # on tied weights, which `attach` refuses
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"does not fit the model: {cause}", key="model.lora.target_modules", value=lora.target_modules
        ) from error
    return model


def _refuse_tied(model: PreTrainedModel, lora: Lora) -> None:
    """An update of a weight that two layers share would reach only one of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(tensor.data_ptr(), []).append(name.replace(".base_layer.", "."))
    for name, layer in _layers(model):
        shared = names[layer.base_layer.weight.data_ptr()]
        if len(shared) > 1:
            raise ConfigError(
                f"{name} shares its weight ({' and '.join(shared)}), so that it cannot have an update of its own; "
                "leave it out",
                key="model.lora.target_modules",
                value=lora.target_modules,
            )


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The layers that have an update, by name; none where there is no adapter."""
    if not is_adapted(model):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def is_adapted(model: PreTrainedModel) -> bool:
    return hasattr(model, "peft_config")


def merged(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """W + (alpha / rank) B A under the base model's own names, one at a time, tied ones once; the model is left alone.

    tensors: its `named_parameters()` or `state_dict().items()`. Without an adapter they come as they are.
    """
    names, updates = _plain_names(model), {f"{name}.base_layer.weight": layer for name, layer in _layers(model)}
    seen: set[int] = set()
    for name, tensor in tensors:
        plain = names.get(name, name)
        shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor itself has no address
        if plain is None or (shard.data_ptr() and shard.data_ptr() in seen):  # 0: an empty shard
            continue
        seen.add(shard.data_ptr())
        layer = updates.get(name)
        weight = tensor.detach()
        yield plain, weight if layer is None else weight + layer.get_delta_weight(ADAPTER).detach()


def _plain_names(model: PreTrainedModel) -> dict[str, str | None]:
    """Tensors of the layers with an update: their names in the base model, None for what is not in it."""
    return {
        f"{name}.{own}": f"{name}.{own.removeprefix('base_layer.')}" if own.startswith("base_layer.") else None
        for name, layer in _layers(model)
        for own in layer.state_dict()
    }


@contextmanager
def switched_off(model: PreTrainedModel) -> Iterator[None]:
    """The base model: no updates while this lasts."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapter(model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write the updates in peft's format; transformers and peft find the base model by its path.

    tensors: `adapter_tensors`, whole, where processes share them.
    """
    from safetensors.torch import save_file

    write_config(model, folder)
    weights = {name: tensor.contiguous() for name, tensor in (tensors or dict(adapter_tensors(model))).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """The half of an adapter that says where its tensors belong and how they are scaled."""
    from copy import copy

    config = copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.target_modules = _in_order(config.target_modules)
    config.save_pretrained(str(folder))


def adapter_tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """The updates' own tensors (not copies), under their names in an adapter's file."""
    return [(PREFIX + name, tensor) for name, tensor in _adapter(model).items()]


def _in_order(target_modules: Any) -> Any:
    """The same file for the same run: a set has no order."""
    return target_modules if isinstance(target_modules, str) else sorted(target_modules)


def load_adapter(model: PreTrainedModel, lora: Lora, folder: Path) -> None:
    """Copy saved updates into those of `model`, bit for bit.

    Raises ConfigError where `model.lora` differs from what the folder was saved with.
    """
    import torch
    from safetensors.torch import load_file

    own = _adapter(model)
    saved = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    if own.keys() != saved.keys():
        name = min(own.keys() ^ saved.keys())
        raise ConfigError(
            f"does not fit the checkpoint {folder}: {name} is in one of them only; leave it as it was",
            key="model.lora.target_modules",
            value=lora.target_modules,
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def check_same(lora: Lora, folder: Path) -> None:
    """Raise ConfigError unless the checkpoint `folder` was saved with this rank and alpha (rank 0: with no adapter)."""
    path = folder / CONFIG
    saved = json.loads(path.read_text()) if path.is_file() else {"r": 0, "lora_alpha": lora.alpha}
    if saved["r"] != lora.rank:
        raise ConfigError(
            f"the run so far has {saved['r']} ({folder}); keep that", key="model.lora.rank", value=lora.rank
        )
    if lora.rank and saved["lora_alpha"] != lora.alpha:
        raise ConfigError(
            f"the run so far has {saved['lora_alpha']} ({folder}); keep that", key="model.lora.alpha", value=lora.alpha
        )


def _adapter(model: PreTrainedModel) -> dict[str, Tensor]:
    """The updates' own tensors (not copies), under their names in a file, without PREFIX."""
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return found


def trained_share(model: PreTrainedModel) -> str:
    """`12,288 of 346,880 parameters` are trained."""
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{trained:,} of {sum(p.numel() for p in parameters):,} parameters"
