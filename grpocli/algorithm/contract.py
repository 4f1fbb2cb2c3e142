"""What an algorithm and its parts get and return: parts of users are tried, arguments of public methods are checked.

Only values of rewards are read, once a step: `loss`, called for every micro-batch, must not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.objective import loss_and_flags
from grpocli.config.parts import nearest
from grpocli.config.user_code import REQUIRED_MEMBERS, choice_of, raised
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {"P": 2, "G": 4, "B": 3, "T": 5}
"""Prompts, completions of a group, rows and tokens of the trial."""
RETURNS = {
    "advantage": "advantages [P, G]",
    "aggregate": "a weight of each row [B]",
    "correction": "a weight of each token [B, T]",
    "entropy": "a bonus of each token [B, T]",
    "keep": "whether a group trains [P]",
    "kl": "an estimate of each token [B, T]",
    "objective": "the loss of each token, with its gradient, alone or as (loss, {name: flags [B, T] or [B]}): [B, T]",
    "question_weight": "a weight of each group [P]",
    "tokens": "whether a token counts [B, T]",
}
"""{part: what it returns}, which ends with the shape."""
GETS = {"scores": "[P, G]", "accuracy": "[P, G]", "rewards": "[P, G]", "advantages": "[B] or [B, T]"}
GETS |= {"group_ids": "[B]", "totals": "(counts of the window)"}
"""{argument: its shape}; [B, T] for all others."""


def try_part(kind: str, part: Any) -> None:
    """Call a part with small tensors. Raises ConfigError with the contract if it fails or returns something else."""
    import torch

    B, T, names = SIZES["B"], SIZES["T"], str(REQUIRED_MEMBERS[f"algorithm/{kind}"]["__call__"]).split()
    scores_PG = torch.arange(8.0).reshape(SIZES["P"], SIZES["G"]) % 3
    logp_BT = -torch.linspace(0.1, 1, B * T).reshape(B, T).requires_grad_()
    given: dict[str, Any] = {name: scores_PG for name, shape in GETS.items() if shape == "[P, G]"}
    given |= {"logp": logp_BT, "mask": torch.ones(B, T), "advantages": torch.ones(B), "group_ids": torch.arange(B)}
    given["totals"] = Totals.of(given["advantages"], given["mask"], given["group_ids"])
    lengths = [scores_PG] if getattr(part, "needs_lengths", False) else []
    shape = [SIZES[letter] for letter in RETURNS[kind].rpartition("[")[2].rstrip("]").split(", ")]
    try:
        found, flags = loss_and_flags(part(*[given.get(name, logp_BT.detach()) for name in names], *lengths))
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"it returns a {type(found).__name__}, which is no tensor")
        whole = found.expand(shape) if kind in ("correction", "entropy", "kl") else found
        wrong = list(whole.shape) != shape
        told = {"it returns": found} if wrong else {name: one for name, one in flags.items() if one.shape[:1] != (B,)}
        problem = ", ".join(f"{name} {list(one.shape)}" for name, one in told.items())
        if kind == "objective" and not problem and not found.requires_grad:
            problem = "its loss has no gradient"
    except Exception as error:  # noqa: BLE001 - of the user's code, or of a result that is no tensor
        problem = raised(error)
    if problem:
        gets = ", ".join(f"{name} {GETS.get(name, '[B, T]')}" for name in names)
        sizes = ", ".join(f"{name}={size}" for name, size in SIZES.items())
        problem = f"gets ({gets}) and returns {RETURNS[kind]}; in a trial with {sizes}: {problem}"
        raise ConfigError(problem, key=f"algorithm/{kind}", value=choice_of(f"algorithm/{kind}", part))


def checked_rewards(rewards: Mapping[str, Tensor], weights: Mapping[str, float] | None) -> dict[str, Tensor]:
    """The rewards as floating-point tensors [P, G].

    Raises ValueError with the reward's name for another shape, an infinite reward or weight, and the weight of a
    missing reward.
    """
    import torch

    if not rewards:
        raise ValueError("an algorithm needs at least one reward: {name: tensor [P, G]}")
    shape = next(iter(rewards.values())).shape
    for name, values in rewards.items():
        if values.ndim != 2 or values.shape != shape:
            raise ValueError(f"reward {name!r} has the shape {list(values.shape)}; give [P, G], the same for all")
        if values.isinf().any():
            group, completion = values.isinf().nonzero()[0].tolist()
            raise ValueError(
                f"reward {name!r} is {values[group, completion].item()} for completion {completion} of group {group}; "
                "give a finite number, or NaN where it does not apply"
            )
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
