"""What a trial is: one attack, drawn from a seed, with what must hold after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from chaos.place import Place

EACH = 1000  # trials of one kind and seed at most: the number of one is `EACH * seed` and its place in the list
T = TypeVar("T")


class Lost(Exception):
    """A promise was not kept; the text says which one and how."""


class LeftOut(Exception):
    """It cannot be tried on this machine; the text says what is missing."""


class Trial(Protocol):
    """A frozen record of one attack; its text says what is done.

    attacks: how many it stands for in the table.
    """

    @property
    def attacks(self) -> int: ...

    def hold(self, place: Place) -> None:
        """Make the attack. Raises Lost where a promise is not kept, LeftOut where it cannot be made here."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """name: as `--only` takes it. promise: what holds, for the table. count: trials of the long form.

    draw: makes that many trials. Each kind goes through all its cases before it repeats one.
    """

    name: str
    promise: str
    count: int
    draw: Callable[[Random, int], Sequence[Trial]]


@dataclass(frozen=True, slots=True)
class Numbered:
    """A trial and the number that repeats it: `--trial KIND:NUMBER`."""

    kind: Kind
    number: int
    trial: Trial

    @property
    def name(self) -> str:
        return f"{self.kind.name}:{self.number}"


def drawn(kind: Kind, seed: int) -> list[Numbered]:
    """The trials of one kind; the same list for the same seed."""
    trials = kind.draw(Random(f"{seed}.{kind.name}"), kind.count)
    return [Numbered(kind, EACH * seed + i, trial) for i, trial in enumerate(trials)]


def dealt(random: Random, cases: Sequence[T], count: int) -> list[T]:
    """`count` of the cases in random order, each as often as any other, give or take one."""
    found: list[T] = []
    while len(found) < count:
        found += random.sample(list(cases), len(cases))
    return found[:count]


def demand(condition: bool, problem: str) -> None:
    """Raise Lost unless the condition holds."""
    if not condition:
        raise Lost(problem)
