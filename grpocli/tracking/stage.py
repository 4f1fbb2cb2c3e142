"""The present stage of a run, how much of it is done, and how long the rest will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from grpocli.tracking.text import duration

Clock = Callable[[], float]

SETTLED = 2.0
"""Seconds of counting before there is an estimate of the time left."""


@dataclass(frozen=True, slots=True)
class Stage:
    """text: the name of the stage, which began at `since` (seconds of a clock). done, total, unit, detail: its
    `Progress`.

    The rate is measured from `began`, when `first` units were done. As long as no more are done, `began` moves on: work
    before the first unit, such as reading prompts, does not count in the rate.
    """

    text: str
    since: float
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    detail: str = ""
    began: float = 0.0
    first: float = 0.0

    @property
    def kind(self) -> str:
        """The text up to the first comma; a count follows it."""
        return self.text.partition(",")[0]

    @property
    def fraction(self) -> float | None:
        """From 0 to 1; None where the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    def renamed(self, text: str, now: float) -> Stage:
        """A new stage, or this one under its new text where only the count has changed."""
        fresh = Stage(text, now)
        return replace(self, text=text) if fresh.kind == self.kind else fresh

    def at(self, now: float, done: float, total: float, unit: str, detail: str = "") -> Stage:
        """This stage with its progress."""
        counted = replace(self, done=done, total=total, unit=unit, detail=detail)
        same = (total, unit) == (self.total, self.unit) and done >= self.done and done > self.first
        return counted if same else replace(counted, began=now, first=done)

    def left(self, now: float) -> float | None:
        """Seconds left at the rate so far; None before there is an estimate."""
        if not self.total or self.done <= self.first or now - self.began < SETTLED:
            return None
        return max(0.0, (self.total - self.done) * (now - self.began) / (self.done - self.first))

    def progress(self, now: float) -> str:
        """`312/1,280 completions, 24%, 2:05 left, token 12 of at most 256`; empty where nothing is counted."""
        share, left = self.fraction, self.left(now)
        count = f"{int(self.done):,}/{self.total:,.0f} {self.unit}" if self.unit and self.total else ""
        parts = (
            count or self.unit,
            "" if share is None else f"{share:.0%}",
            "" if left is None else f"{duration(left)} left",
            self.detail,
        )
        return ", ".join(filter(None, parts))


class CurrentStage:
    """The stage that a run is in. The trainer begins stages; its progress may come from any thread."""

    def __init__(self, clock: Clock = time.monotonic, text: str = "starting") -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.stage = Stage(text, clock())

    def begin(self, text: str, fraction: float | None = None) -> Stage:
        """Begin a stage, or count on in the present one. fraction: of it that is done, from 0 to 1."""
        with self._lock:
            now = self._clock()
            stage = self.stage.renamed(text, now)
            self.stage = stage if fraction is None else stage.at(now, fraction, 1.0, "")
            return self.stage

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """A `Progress`."""
        with self._lock:  # without it a late report brings the previous stage back
            self.stage = self.stage.at(self._clock(), done, total, unit, detail)
