"""Progress reports and cancellation of work that takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """A callback for the progress of long work. Any thread may call it; it returns at once."""

    def __call__(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """Report `done` of `total` units, such as "completions". Both may be fractions.

        total: 0 if unknown. detail: further text, such as "token 12 of at most 256".
        """
        ...


def unreported(done: float, total: float, unit: str, detail: str = "") -> None:
    """A no-op Progress."""


def never() -> bool:
    """A `Watch.cancelled` that is always false."""
    return False


@dataclass(frozen=True, slots=True)
class Watch:
    """The callbacks of long work: it reports its progress, and asks whether it was cancelled.

    cancelled: once true, it stays true. Work that sees it returns early, with its results so far.
    """

    progress: Progress = unreported
    cancelled: Callable[[], bool] = never

    @property
    def cancellable(self) -> bool:
        """Whether the work can be cancelled at all. The same in every process."""
        return self.cancelled is not never

    def part(self, before: float, whole: float, times: float = 1.0) -> Watch:
        """The watch of one part of the work: earlier parts did `before` of `whole` units.

        times: the number of units that one unit of the part counts for.
        """
        progress = self.progress

        def report(done: float, total: float, unit: str, detail: str = "") -> None:
            progress(before + done * times, whole, unit, detail)

        return Watch(report, self.cancelled)

    def detailed(self, text: str) -> Watch:
        """The watch of work whose reports have the text before their details."""
        progress = self.progress

        def report(done: float, total: float, unit: str, detail: str = "") -> None:
            progress(done, total, unit, f"{text}, {detail}" if detail else text)

        return Watch(report, self.cancelled)


UNWATCHED = Watch()


class Cancelled(Exception):
    """Raised by work that ended without a result because its `Watch` was cancelled."""
