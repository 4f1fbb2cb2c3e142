"""What scoring took and could not do, by reward and task."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

K = TypeVar("K")
Pair = tuple[str, str]  # a reward and a task, by their names


@dataclass(frozen=True, slots=True)
class Tally:
    """samples: of each task. bare: those of them to which no reward applies.

    errors: how many could not be scored; first: the first of these as a sentence; unreachable: how many of them because
    a service was unavailable. silent: for how many a reward that is one of their task's gave None. timeouts: how many
    were wrong because scoring them took too long; late: the first of these as a sentence.
    """

    samples: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    errors: Counter[Pair] = field(default_factory=Counter)
    first: dict[Pair, str] = field(default_factory=dict)
    silent: Counter[Pair] = field(default_factory=Counter)
    bare: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[Pair] = field(default_factory=Counter)
    late: dict[Pair, str] = field(default_factory=dict)
    unreachable: Counter[Pair] = field(default_factory=Counter)

    def then(self, later: Tally) -> Tally:
        """Both, one after the other."""
        return self._with(later, self.seconds + later.seconds)

    def beside(self, other: Tally) -> Tally:
        """Both, at the same time in two processes."""
        return self._with(other, max(self.seconds, other.seconds))

    def _with(self, other: Tally, seconds: float) -> Tally:
        return Tally(
            _sum(self.samples, other.samples),
            seconds,
            _sum(self.errors, other.errors),
            other.first | self.first,
            _sum(self.silent, other.silent),
            _sum(self.bare, other.bare),
            _sum(self.timeouts, other.timeouts),
            other.late | self.late,
            _sum(self.unreachable, other.unreachable),
        )

    def errors_of(self, task: str) -> int:
        """How many scores of a task's samples are missing."""
        return sum(failed for (_, where), failed in self.errors.items() if where == task)

    @property
    def metrics(self) -> dict[str, float]:
        found = {"time/reward": self.seconds}
        for what, counted in (("errors", self.errors), ("timeouts", self.timeouts)):
            for (reward, _), number in counted.items():
                name = f"rewards/{reward}/{what}"
                found[name] = found.get(name, 0.0) + number
        return found


def _sum(one: Counter[K], other: Counter[K]) -> Counter[K]:
    """With what is 0 in both, which `+` leaves out."""
    both = Counter(one)
    both.update(other)
    return both
