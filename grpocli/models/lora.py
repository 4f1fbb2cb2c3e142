"""LoRA: a frozen base model, and small trained updates to its weights (arXiv 2106.09685).

    W' = W + (alpha / rank) B A        W [out, in], B [out, rank] starts at 0, A [rank, in] at random

peft's layers replace linear layers in place: only names of parameters change, and `merged` has the original ones.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import check_regex, require, section
from grpocli.errors import config_errors
from grpocli.models.quantization import quantized_layers

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ADAPTER = "default"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OTHER_LORA = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")
"""Keys of adapters that are more than W + (alpha / rank) B A of linear layers."""
PREFIX = "base_model.model."
"""Prefix of names in adapter files, as peft and vLLM expect."""


@section("model.lora")
class Lora:
    """Low-rank updates of linear layers, LoRA (arXiv 2106.09685); without dropout, which the sampler lacks too."""

    rank: int = 0
    """Rank of the updates; 0: train all weights instead."""
    alpha: float = 32.0
    """The updates are scaled by alpha / rank."""
    path: str | None = None
    """Folder of an adapter of peft's to go on with, such as a checkpoint of a run with LoRA, instead of updates of 0.
    It sets the rank, alpha and target modules; the reference of a KL term has it, too."""
    target_modules: Any = "all-linear"
    """Layers with updates: `all-linear` (every linear layer but the output head and the experts of a mixture), a list
    of module names such as [q_proj,v_proj], or a regular expression that whole names match."""

    def __post_init__(self) -> None:
        file = Path(self.path or "").expanduser() / CONFIG
        if self.path is not None and (file.is_file() or not self.rank):  # a saved config has the adapter's rank
            self._take_adapter(file)
        require(self, "rank", self.rank >= 0, "must be 0 (train all weights) or more")
        require(self, "alpha", 0 < self.alpha < math.inf, "must be a finite number above 0")
        names = [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules
        ok = isinstance(names, list) and bool(names) and all(isinstance(n, str) and n for n in names)
        require(self, "target_modules", ok, "give all-linear, a list of module names, or a regular expression")
        if isinstance(self.target_modules, str):
            check_regex(self, "target_modules")

    def check_ready(self) -> None:
        """Raise ConfigError without peft, if there are updates."""
        there = not self.rank or find_spec("peft") is not None
        require(self, "rank", there, "needs peft, which is not installed: pip install peft")

    def _take_adapter(self, file: Path) -> None:
        """Take the rank, alpha and target modules of an adapter. Raises ConfigError for one that LoRA here is not."""
        require(self, "path", file.is_file(), f"has no {CONFIG}; give the folder of an adapter")
        says = f"{CONFIG} cannot be read: {{}}"
        with config_errors(OSError, ValueError, TypeError, says=says, key="model.lora.path", value=self.path):
            saved = dict(json.loads(file.read_text()))
        kind = saved.get("peft_type")
        require(self, "path", kind == "LORA", f"the adapter is of the kind {kind}, and grpocli trains LoRA")
        other = [name for name in OTHER_LORA if saved.get(name)] + ["bias"] * (saved.get("bias", "none") != "none")
        require(self, "path", not other, f"the adapter has {' and '.join(other)}, and grpocli trains plain LoRA")
        for name, key in (("rank", "r"), ("alpha", "lora_alpha"), ("target_modules", "target_modules")):
            unset = getattr(self, name) in (getattr(Lora, name), saved[key])
            require(self, name, unset, f"the adapter of model.lora.path has {saved[key]}; leave it out")
            object.__setattr__(self, name, saved[key])


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> PreTrainedModel:
    """Freeze the weights of a model, and add an update of 0 to each targeted layer. Returns the same model.

    A depends only on `seed`. Raises ConfigError, naming the key, if no layer can be targeted, or an output head whose
    weight is the embedding: an update would reach only one of them.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    where = {"key": "model.lora.target_modules", "value": lora.target_modules}
    fits = config_errors(ValueError, says="does not fit the model: {}", **where)
    with fits, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.simplefilter("ignore", UserWarning)  # on tied weights, which are refused below
        convert_peft_config_for_transformers(config, model, None)
        _leave_out_experts(config, lora)
        inject_adapter_in_model(config, model, ADAPTER)
    ends = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    weights = {id(getattr(one, "base_layer", one).weight) for one in ends}
    tied = len(weights) < len(ends) and any(hasattr(one, "base_layer") for one in ends)
    require(lora, "target_modules", not tied, "the embedding and the output head share a weight; leave them out")
    return model


def _leave_out_experts(config: Any, lora: Lora) -> None:
    """Drop the experts and routers that peft adds to `all-linear`. Raises ConfigError for those that a user names.

    The experts of a layer are one parameter, to which vLLM on a CPU cannot add updates. Names that peft takes for
    experts (gate_proj, up_proj, down_proj) are left out elsewhere too, so that peft loads the adapter.
    """
    if config.target_parameters:
        names = ", ".join(sorted(config.target_parameters))
        problem = f"names experts or routers ({names}), which are not linear layers: leave them out"
        require(lora, "target_modules", lora.target_modules == Lora.target_modules, problem)
        config.target_parameters, config.rank_pattern, config.alpha_pattern = None, {}, {}


def lora_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The layers with an update, by name; none without an adapter."""
    if not is_adapted(model):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def is_adapted(model: PreTrainedModel) -> bool:
    return hasattr(model, "peft_config")


def merged(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield W + (alpha / rank) B A under the base model's names, tied ones once; the model is unchanged.

    tensors: its `named_parameters()` or `state_dict().items()`. Weights of 4 bits are yielded as their numbers.
    """
    updates = {f"{name}.base_layer.weight": layer for name, layer in lora_layers(model)}
    names = {  # in the base model; None: not in it
        f"{name}.{own}": f"{name}.{own.removeprefix('base_layer.')}" if own.startswith("base_layer.") else None
        for name, layer in lora_layers(model)
        for own in layer.state_dict()
    }
    quantized = {f"{name}.weight": layer for name, layer in quantized_layers(model)}
    seen: set[int] = set()
    for name, tensor in tensors:
        plain = names.get(name, name)
        shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor has no address
        if plain is None or (shard.data_ptr() and shard.data_ptr() in seen):  # 0: an empty shard
            continue
        seen.add(shard.data_ptr())
        layer = updates.get(name)
        weight = quantized[name].dequantized() if name in quantized else tensor.detach()
        yield plain, weight if layer is None else weight + layer.get_delta_weight(ADAPTER).detach()


@contextmanager
def switched_off(model: PreTrainedModel) -> Iterator[None]:
    """A block in which the updates are off: the model is the base model."""
    with ExitStack() as stack:
        for _, layer in lora_layers(model):
            layer.enable_adapters(False)
            stack.callback(layer.enable_adapters, True)
        yield


def save_adapter(model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write the updates in peft's format. tensors: `adapter_tensors`, gathered, if processes shard them."""
    from safetensors.torch import save_file

    write_config(model, folder)
    weights = {name: tensor.contiguous() for name, tensor in (tensors or dict(adapter_tensors(model))).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the config of an adapter: the target modules and the scale."""
    config = copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # so that the same run writes the same file
    config.save_pretrained(str(folder))


def adapter_tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """The tensors of the updates (not copies), under their names in an adapter file."""
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return [(PREFIX + name, tensor) for name, tensor in found.items()]


def load_adapter(model: PreTrainedModel, lora: Lora, folder: Path) -> None:
    """Copy saved updates into those of `model`, bit for bit. Raises ConfigError if `model.lora` differs from them."""
    import torch
    from safetensors.torch import load_file

    own, saved = dict(adapter_tensors(model)), load_file(folder / WEIGHTS)
    other = min(own.keys() ^ saved.keys(), default="")
    problem = f"does not fit the checkpoint {folder}: {other} is in only one of them; keep the value of the run"
    require(lora, "target_modules", not other, problem)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def check_same(lora: Lora, folder: Path) -> None:
    """Raise ConfigError unless the checkpoint in `folder` has this rank and alpha (rank 0: no adapter)."""
    path = folder / CONFIG
    saved = json.loads(path.read_text()) if path.is_file() else {"r": 0, "lora_alpha": lora.alpha}
    for name, key in (("rank", "r"), ("alpha", "lora_alpha")):
        require(lora, name, getattr(lora, name) == saved[key], f"the run so far has {saved[key]} ({folder}); keep that")
