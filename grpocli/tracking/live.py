"""The live view: progress, the latest metrics, and a completion with its rewards. `layout` draws what this holds."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text as Line

from grpocli.data import Text
from grpocli.tracking.layout import Screen
from grpocli.tracking.text import clean, one_line, words
from grpocli.tracking.view import Pace, View

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to be shown; the texts are safe to print."""

    prompt: str
    completion: str
    rewards: Mapping[str, float]
    advantage: float


@dataclass(frozen=True, slots=True)
class Shown:
    """What is on the screen. Replaced, never changed: another thread draws it."""

    title: str = ""
    stage: str = "starting"
    fraction: float | None = None
    since: float = 0.0
    metrics: Mapping[str, Any] | None = None
    before: Mapping[str, Any] | None = None
    rewards: tuple[float, ...] = ()
    sample: Sample | None = None
    over: bool = False


class LiveView(View):
    """Redrawn in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.pace = Pace()
        self.shown = Shown(since=time.monotonic())
        self._live = Live(
            Screen(self), console=console, refresh_per_second=6, transient=False, vertical_overflow="crop"
        )
        self._live.start()
        atexit.register(self.stop)  # a cursor left hidden outlives the run

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        self.pace.total = total_steps
        self._show(title=one_line(title))
        if plan:
            self.note("\n".join(plan))

    def resumed(self, done_steps: int) -> None:
        self.pace.done = done_steps
        if done_steps:
            self.note(f"going on after step {done_steps}")

    def stage(self, text: str, fraction: float | None = None) -> None:
        text = one_line(text)
        since = self.shown.since if text == self.shown.stage else time.monotonic()
        self._show(stage=text, fraction=fraction, since=since)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.pace.step(step, metrics.get("time/step"))
        reward = metrics.get("reward")
        known = isinstance(reward, int | float) and reward == reward
        rewards = (*self.shown.rewards, float(reward)) if known else self.shown.rewards  # type: ignore[arg-type]
        self._show(metrics=dict(metrics), before=self.shown.metrics, rewards=rewards)

    def sample(self, prompt: Text, completion: str, rewards: Mapping[str, float], advantage: float) -> None:
        self._show(sample=Sample(clean(words(prompt)), clean(completion), dict(rewards), advantage))

    def note(self, text: str) -> None:
        self._console.print(Line(clean(text)))

    def warn(self, text: str) -> None:
        self._console.print(Line(f"warning: {clean(text)}", style="yellow"))

    def stop(self) -> None:
        atexit.unregister(self.stop)
        if self._live.is_started:
            self._show(over=True, stage="done" if self.pace.finished else "stopped", fraction=None)
            self._live.stop()

    def _show(self, **changes: Any) -> None:
        self.shown = replace(self.shown, **changes)
