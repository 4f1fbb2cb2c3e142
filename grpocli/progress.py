"""Progress reports and cancellation of work that takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """A callback for work in progress; may be called in any thread, and returns at once."""

    def __call__(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """Report `done` of `total` units, such as "completions"; fractions count too.

        total: 0 where it is unknown. detail: more to show, such as "token 12 of at most 256".
        """
        ...


def unreported(done: float, total: float, unit: str, detail: str = "") -> None:
    """A Progress that does nothing."""


def never() -> bool:
    """A `Watch.cancelled` that is always false."""
    return False


@dataclass(frozen=True, slots=True)
class Watch:
    """Given to long work, which reports its progress to it and asks it whether to stop.

    cancelled: whether to stop; once true it stays true. Work that asks then returns early, with what it has.
    """

    progress: Progress = unreported
    cancelled: Callable[[], bool] = never

    @property
    def cancellable(self) -> bool:
        """Whether it can be cancelled at all, which is the same in every process."""
        return self.cancelled is not never

    def part(self, before: float, whole: float, times: float = 1.0) -> Watch:
        """The watch of one piece of several: `before` units of `whole` are done by earlier pieces.

        times: how many units one unit of the piece counts for.
        """
        progress = self.progress

        def report(done: float, total: float, unit: str, detail: str = "") -> None:
            progress(before + done * times, whole, unit, detail)

        return Watch(report, self.cancelled)


UNWATCHED = Watch()


class Cancelled(Exception):
    """Work ended early because its `Watch` was cancelled: there is no result."""
