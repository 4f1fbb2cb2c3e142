"""Checks the types and shapes of the arguments of an algorithm's public methods.

Only values of rewards are read, once a step: `loss`, called for every micro-batch, must not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpocli.config.parts import nearest

if TYPE_CHECKING:
    from torch import Tensor


def checked_rewards(rewards: Mapping[str, Tensor], weights: Mapping[str, float] | None) -> dict[str, Tensor]:
    """The rewards as floating-point tensors [P, G].

    Raises TypeError or ValueError with the reward's name for any other value, for an infinite reward or weight, and for
    the weight of a missing reward.
    """
    import torch

    if not isinstance(rewards, Mapping):
        raise TypeError(f"rewards is a {type(rewards).__name__}; give a dict {{name: tensor [P, G]}}")
    if not rewards:
        raise ValueError("an algorithm needs at least one reward: {name: tensor [P, G]}")
    shape = None
    for name, values in rewards.items():
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"reward {name!r} is a {type(values).__name__}; give a tensor [P, G]")
        if values.ndim != 2:
            raise ValueError(f"reward {name!r} has the shape {list(values.shape)}; give [P, G], a row a group")
        if shape not in (None, values.shape):
            raise ValueError(f"reward {name!r} has the shape {list(values.shape)}, the others {list(shape or ())}")
        if values.isinf().any():
            group, completion = values.isinf().nonzero()[0].tolist()
            raise ValueError(
                f"reward {name!r} is {values[group, completion].item()} for completion {completion} of group {group}; "
                "give a finite number, or NaN where it does not apply"
            )
        shape = values.shape
    for name, weight in (weights or {}).items():
        if name not in rewards:
            raise ValueError(f"weights[{name!r}]: there is no such reward{nearest(name, rewards)}")
        if not math.isfinite(weight):
            raise ValueError(f"weights[{name!r}] is {weight}; give a finite number")
    return {n: v if v.is_floating_point() else v.to(torch.get_default_dtype()) for n, v in rewards.items()}


def check_accuracy(names: Sequence[str], rewards: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `names` holds the name of a reward for each group."""
    groups = len(next(iter(rewards.values())))
    if len(names) != groups:
        raise ValueError(f"accuracy has {len(names)} names, and there are {groups} groups; give one for each")
    for name in names:
        if name not in rewards:
            raise ValueError(f"accuracy: there is no reward {name!r}{nearest(name, rewards)}")


def check_rows(logp: Tensor, per_token: Mapping[str, Tensor | None], per_row: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError with the name of an argument of `loss` whose shape would be broadcast silently."""
    if logp.ndim != 2:
        raise ValueError(f"loss(logp=...) has the shape {list(logp.shape)}; give [B, T]")
    for arguments, shape in ((per_token, logp.shape), (per_row, logp.shape[:1])):
        for name, value in arguments.items():
            if value is not None and value.shape != shape:
                raise ValueError(f"loss({name}=...) has the shape {list(value.shape)}; give {list(shape)}, as logp has")
