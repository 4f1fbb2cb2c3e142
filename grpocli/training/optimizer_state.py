"""The optimizer's state in a checkpoint: whole tensors under their parameters' names, however processes share them.

A tensor `NAME.exp_avg` belongs to the parameter `NAME`. So any number of processes, and any `hardware.parallel`, can
go on from it; nothing is unpickled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.distributed import sharded_safetensors as shards

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from grpocli.distributed.world import World
    from grpocli.training.policy import Policy

STEM = "optimizer"
INDEX = f"{STEM}.safetensors.index.json"


def write(folder: Path, policy: Policy, optimizer: Any, world: World) -> None:
    """Collective."""
    files = shards.write(_whole(policy, optimizer), folder, STEM, world)
    if world.is_main:
        shards.write_index(files, folder / INDEX)


def _trained(policy: Policy) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that the optimizer changes, in the one order of every process."""
    return ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)


def _whole(policy: Policy, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state, one at a time. Every process walks through it, to its end."""
    for name, parameter in _trained(policy):
        for kind, tensor in policy.parallel.moments(optimizer, parameter):
            yield f"{name}.{kind}", tensor


def restore(folder: Path, policy: Policy, optimizer: Any) -> None:
    """Set the state to what was written; a process reads its part. Raises ValueError where it does not fit, or cannot
    be read."""
    from safetensors import SafetensorError

    try:
        with shards.reading(folder / INDEX) as stored:
            state: dict[str, dict[str, shards.Stored]] = defaultdict(dict)  # none of a weight that had no gradient yet
            for key, tensor in stored.items():
                name, _, kind = key.rpartition(".")
                state[name][kind] = tensor
            unknown = state.keys() - {name for name, _ in _trained(policy)}
            if unknown:
                raise ValueError(f"there is optimizer state for {min(unknown)!r}, which is not trained")
            if len({frozenset(kinds) for kinds in state.values()}) > 1:
                raise ValueError(f"{INDEX} has not the same tensors for each parameter")
            for name, parameter in _trained(policy):
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves a parameter flat
                if other := [kind for kind, one in state[name].items() if one.shape not in ((), shape)]:
                    raise ValueError(f"{name}.{other[0]} has not the shape of {name}, {shape}")
                policy.parallel.remember(optimizer, parameter, state[name])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"optimizer: {error}") from error
