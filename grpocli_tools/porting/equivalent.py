"""What grpocli has in place of a name of another trainer, and what the tables of names share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

UNSTATED: Final = object()
"""Marks a foreign name whose default is not stated."""


@dataclass(frozen=True, slots=True)
class Equivalent:
    """The equivalent in grpocli.

    overrides: `{}` is replaced by the value; empty if there is nothing to set. note: a remark after the overrides.
    values: {value in lower case: overrides for it}. default: the default of the other trainer.
    why: why the default here differs; empty if it does not. lacks: whether grpocli lacks the function.
    """

    overrides: str = ""
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    default: Any = UNSTATED
    why: str = ""
    lacks: bool = False

    def sentence(self, value: str) -> str:
        """The advice for a value, such as `write optim.lr=1e-6`."""
        written = " ".join(shlex.quote(one) for one in self.written(value))
        return "; ".join(filter(None, [f"write {written}" if written else "", self.note]))

    def written(self, value: str) -> list[str]:
        """The overrides for a value."""
        overrides = self.values.get(value.strip("'\"").lower(), self.overrides)
        return [one.format(value) for one in overrides.split()]

    def examples(self) -> Iterator[str]:
        """All overrides that may be advised."""
        yield from filter(None, [self.overrides, *self.values.values()])


def default(value: Any, equivalent: Equivalent | str, why: str = "", note: str = "") -> Equivalent:
    """An equivalent, or its overrides, of a name whose default is `value`."""
    if isinstance(equivalent, str):
        return Equivalent(equivalent, note, default=value, why=why)
    return replace(equivalent, default=value, why=why)


def nothing(value: Any, note: str) -> Equivalent:
    """A name that needs no counterpart, with the reason."""
    return Equivalent("", f"nothing to set: {note}", default=value)


def missing(value: Any, note: str) -> Equivalent:
    """A name whose function grpocli lacks, with the reason or what to do instead."""
    return Equivalent("", f"no counterpart: {note}", default=value, lacks=True)


BATCH = Equivalent(
    "rollout.prompts_per_step={}",
    "the prompts of a step on all devices, each with rollout.group_size completions",
)
MEMORY = Equivalent(
    "", "nothing to set: train.micro_batch_tokens bounds the memory, and batches are split and summed by it"
)
EPOCHS = Equivalent(
    "", "train.steps=N counts steps of rollout.prompts_per_step prompts (train.epochs is passes over a step)"
)
LENGTH = Equivalent("rollout.max_completion_tokens={}")
MODEL = Equivalent("model={}")
ALGORITHMS = {
    "bnpo": "algorithm=grpo algorithm/aggregate=token_mean algorithm.aggregate.scope=micro_batch",
    "cispo": "algorithm=cispo",
    "dapo": "algorithm=dapo",
    "dr_grpo": "algorithm=drgrpo",
    "grpo": "algorithm=grpo",
    "gspo": "algorithm=gspo",
    "luspo": "algorithm=luspo",
    "rloo": "algorithm=rloo",
    "reinforce_plus_plus": "algorithm=reinforce_pp",
    "reinforce_plus_plus_baseline": "algorithm=reinforce_pp algorithm.advantage.over=tokens",
    "sapo": "algorithm=sapo",
}
ORDERS = {"true": "task.order=shuffled", "false": "task.order=file"}
"""Whether a trainer shuffles its data."""
SHOWN = "every completion is in RUN/rollouts, and `grpocli rollouts RUN` shows them"
