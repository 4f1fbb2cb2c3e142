"""A trial: one attack drawn from a seed, and the promise that must hold after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from chaos.workspace import Workspace

EACH = 1000  # most trials of one kind and seed; a trial's number is `EACH * seed` plus its index
T = TypeVar("T")


class PromiseBroken(Exception):
    """A promise did not hold; the message says which one."""


class Skipped(Exception):
    """The trial cannot run on this machine; the message says what is missing."""


class Trial(Protocol):
    """A frozen record of one attack, described by `str()`.

    attacks: how many attacks it counts as in the table.
    """

    @property
    def attacks(self) -> int: ...

    def execute(self, workspace: Workspace) -> None:
        """Make the attack. Raises PromiseBroken, or Skipped if it cannot be made here."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of trial: its name for `--only`, the number of trials of `make chaos`, and the function that draws them.

    Each kind covers all its cases before it repeats one.
    """

    name: str
    count: int
    draw: Callable[[Random, int], Sequence[Trial]]


@dataclass(frozen=True, slots=True)
class NumberedTrial:
    """A trial with the number that repeats it: `--trial KIND:NUMBER`."""

    kind: Kind
    number: int
    trial: Trial

    @property
    def name(self) -> str:
        return f"{self.kind.name}:{self.number}"


def draw_trials(kind: Kind, seed: int) -> list[NumberedTrial]:
    """The trials of one kind, the same for the same seed."""
    trials = kind.draw(Random(f"{seed}.{kind.name}"), kind.count)
    return [NumberedTrial(kind, EACH * seed + i, trial) for i, trial in enumerate(trials)]


def spread(random: Random, cases: Sequence[T], count: int) -> list[T]:
    """`count` cases in random order; counts of two cases differ by at most one."""
    found: list[T] = []
    while len(found) < count:
        found += random.sample(list(cases), len(cases))
    return found[:count]


def require(condition: bool, problem: str) -> None:
    """Raise PromiseBroken unless the condition holds."""
    if not condition:
        raise PromiseBroken(problem)
