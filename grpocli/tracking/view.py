"""What a person sees of a run: a live view in a terminal, plain lines elsewhere, nothing in the other processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpocli.data import Text

if TYPE_CHECKING:
    from rich.console import Console


class View:
    """Says nothing; the two that do are below."""

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        """The run's name, its batch plan, and how many steps it has."""

    def resumed(self, done_steps: int) -> None:
        """How many steps were done in earlier sessions."""

    def stage(self, text: str, fraction: float | None = None) -> None:
        """What is going on now, and how much of it is done."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""

    def sample(self, prompt: Text, completion: str, rewards: Mapping[str, float], advantage: float) -> None:
        """A completion of the last step."""

    def note(self, text: str) -> None:
        """A sentence that stays."""

    def stop(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""


class Pace:
    """Steps done and the time left, from the seconds that steps have taken."""

    def __init__(self) -> None:
        self.total = self.done = self.first = 0
        self._started: float | None = None

    def step(self, step: int, seconds: float) -> None:
        if self._started is None:
            self._started, self.first = time.monotonic() - seconds, step - 1
        self.done = step

    @property
    def seconds_a_step(self) -> float:
        steps = self.done - self.first
        return (time.monotonic() - self._started) / steps if self._started and steps else 0.0

    @property
    def left(self) -> str:
        return duration((self.total - self.done) * self.seconds_a_step)


class PlainView(View):
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace()
        self._stage = ""

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        self._pace.total = total_steps
        if plan:
            self._say(f"run {title}")
        for line in plan:
            self._say(f"  {line}")

    def resumed(self, done_steps: int) -> None:
        if done_steps:
            self._say(f"going on after step {done_steps}")

    def stage(self, text: str, fraction: float | None = None) -> None:
        # within steps, stages follow each other too fast to be worth lines
        if text != self._stage and not self._pace.done:
            self._say(f"{text} ...")
        self._stage = text

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.step(step, metrics.get("time/step", 0.0))
        shown = "  ".join(f"{label} {number(metrics[key])}" for key, label in LINE.items() if key in metrics)
        width = len(str(self._pace.total))
        self._say(f"step {step:>{width}}/{self._pace.total}  {shown}  {self._pace.left} left")

    def note(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


LINE = {"reward": "reward", "loss": "loss", "kl": "kl", "completions/mean_length": "length", "time/step": "seconds"}
"""Metrics of a plain line, and what it calls them."""


def number(value: Any) -> str:
    """A number in about six characters."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """`3:05` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def make_view() -> View:
    """The live view in a terminal, plain lines elsewhere."""
    from rich.console import Console

    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        from grpocli.tracking.live import LiveView

        return LiveView(console)
    return PlainView(Console(file=sys.stdout, no_color=True, width=100_000))


def silent_view() -> View:
    return View()
