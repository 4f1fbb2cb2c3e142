"""Views that are redrawn in a terminal: of a run, and one line for other commands. `layout` draws them."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text as Line

from grpocli.tracking.layout import Screen, stage_line
from grpocli.tracking.stage import CurrentStage
from grpocli.tracking.text import clean, one_line, words
from grpocli.tracking.view import Pace, Sample, View

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True, slots=True)
class Shown:
    """What is on the screen; the sample's texts are safe to print. Replaced, never changed: another thread draws it."""

    title: str = ""
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
        self.current = CurrentStage()
        self.shown = Shown()
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
        self.current.begin(one_line(text), fraction)

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        self.current.progress(done, total, unit, one_line(detail))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.pace.step(step, metrics.get("time/step"))
        reward = metrics.get("reward")
        known = isinstance(reward, int | float) and reward == reward
        rewards = (*self.shown.rewards, float(reward)) if known else self.shown.rewards  # type: ignore[arg-type]
        self._show(metrics=dict(metrics), before=self.shown.metrics, rewards=rewards)

    def sample(self, sample: Sample) -> None:
        self._show(
            sample=replace(
                sample,
                prompt=clean(words(sample.prompt)),
                completion=clean(sample.completion),
                answer=None if sample.answer is None else one_line(sample.answer),
            )
        )

    def note(self, text: str) -> None:
        self._console.print(Line(clean(text)))

    def warn(self, text: str) -> None:
        self._console.print(Line(f"warning: {clean(text)}", style="yellow"))

    def stop(self, last_line: str = "") -> None:
        atexit.unregister(self.stop)
        if self._live.is_started:
            self.current.begin(last_line or ("done" if self.pace.finished else "stopped"))
            self._show(over=True)
            self._live.stop()

    def _show(self, **changes: Any) -> None:
        self.shown = replace(self.shown, **changes)


class StatusView(View):
    """One line with the present stage, removed at the end."""

    def __init__(self, console: Console) -> None:
        self._console, self._spinner = console, Spinner("dots")
        self._current = CurrentStage()
        self._live = Live(get_renderable=self._line, console=console, refresh_per_second=6, transient=True)
        self._live.start()
        atexit.register(self.stop)

    def stage(self, text: str, fraction: float | None = None) -> None:
        self._current.begin(one_line(text), fraction)

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        self._current.progress(done, total, unit, one_line(detail))

    def note(self, text: str) -> None:
        self._console.print(Line(clean(text)))

    def stop(self, last_line: str = "") -> None:
        atexit.unregister(self.stop)
        self._live.stop()

    def _line(self) -> RenderableType:
        return stage_line(self._current.stage, self._spinner, self._console)
