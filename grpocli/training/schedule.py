"""Schedules of the learning rate: pure functions of an update's number, so that a resume restores none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError

OWN: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
"""Schedules without arguments, as functions of the share of the updates after the warm-up."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""The schedules of transformers that are functions of an update's number, with their arguments."""

NEEDED = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Arguments of which a schedule needs one."""

STATEFUL = ("reduce_lr_on_plateau", "greedy")
"""The schedules of transformers that follow a metric."""


def refuse_stateful(name: str) -> None:
    """Raise ConfigError for a schedule that follows a metric."""
    if name in STATEFUL:
        problem = "follows a metric, and a learning rate here depends on the number of the update alone, so that a "
        problem += "resumed run repeats it"
        raise ConfigError(problem, key="optim.schedule", value=name, hint=f"choose one of {', '.join(ARGUMENTS)}")


def check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError unless transformers' schedule has these arguments. Loads no slow library."""
    known = ARGUMENTS[name]
    for argument, value in arguments.items():
        key = f"optim.schedule_arguments.{argument}"
        if argument not in known:
            choices = f"choose of {', '.join(known)}{nearest(argument, known)}" if known else "it has none"
            raise ConfigError(f"schedule={name} has no such argument: {choices}", key=key, value=value)
        if argument.endswith("_type"):
            if value not in ("linear", "cosine", "1-sqrt"):
                raise ConfigError("choose one of linear, cosine, 1-sqrt", key=key, value=value)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError("must be a finite number of 0 or more", key=key, value=value)
    needed = NEEDED.get(name, ())
    if len(needed) > 0 and sum(argument in arguments for argument in needed) != 1:
        problem = f"schedule={name} needs {'one of ' * (len(needed) > 1)}{' and '.join(needed)}"
        raise ConfigError(problem, key="optim.schedule_arguments", value=dict(arguments))


def check_total(name: str, arguments: Mapping[str, Any], warmup: int, total: int) -> None:
    """Raise ConfigError for a warm-up and a decay that overlap in `total` updates: the rate would jump between them."""
    decay = arguments.get("num_decay_steps", 0)
    if name == "warmup_stable_decay" and "num_stable_steps" not in arguments and warmup + decay > total:
        problem = f"with optim.warmup_steps={warmup} these are more than the {total:,} updates of the run"
        key = "optim.schedule_arguments.num_decay_steps"
        raise ConfigError(problem, key=key, value=decay, hint="lower one of them, or raise train.steps")


def scheduled(lr: float, name: str, arguments: Mapping[str, Any], warmup: int, update: int, total: int) -> float:
    """The learning rate of update number `update` (from 0) of `total`.

    In the warm-up it rises linearly to `lr`, and is never 0. After it the schedule is transformers'; a schedule whose
    arguments describe a warm-up has that one instead. Raises ConfigError for a value that transformers refuses.
    """
    own_warmup = not any(argument.startswith("warmup_") for argument in arguments)
    if update < warmup and own_warmup:
        return lr * (update + 1) / (warmup + 1)
    if name in OWN and not arguments:
        return lr * OWN[name]((update - warmup) / max(total - warmup, 1))
    factor = _factors(lr, name, tuple(sorted(arguments.items())), warmup, total)
    return lr * float(factor(update))


@lru_cache(maxsize=8)
def _factors(
    lr: float, name: str, arguments: tuple[tuple[str, Any], ...], warmup: int, total: int
) -> Callable[[int], float]:
    """The function that transformers' schedule multiplies `lr` by."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    try:
        made: Any = get_scheduler(name, optimizer, warmup, total, dict(arguments))
        found: Callable[[int], float] = made.lr_lambdas[0]
        found(total - 1)
    except (TypeError, ValueError, ArithmeticError) as error:
        problem = f"transformers refuses these arguments of schedule={name}: {error}"
        raise ConfigError(problem, key="optim.schedule_arguments", value=dict(arguments)) from error
    return found
