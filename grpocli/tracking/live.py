"""The live view: progress, the latest metrics, and a completion with its rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text as Line

from grpocli.data import Text
from grpocli.tracking.view import Pace, View, duration, number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Task

BARS = "▁▂▃▄▅▆▇█"


class LiveView(View):
    """Redrawn in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace()
        self._metrics: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._sample: RenderableType | None = None
        self._title = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _Left(self._pace),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=1.0)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=False)
        self._live.start()

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        self._title, self._pace.total = title, total_steps
        if plan:
            self.note("\n".join(plan))

    def resumed(self, done_steps: int) -> None:
        self._pace.done = done_steps
        if done_steps:
            self.note(f"going on after step {done_steps}")

    def stage(self, text: str, fraction: float | None = None) -> None:
        steps = self._pace.done / self._pace.total if self._pace.total else 0.0
        self._progress.update(
            self._task, description=clean(text), completed=steps if fraction is None else fraction
        )

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.step(step, metrics.get("time/step", 0.0))
        self._before, self._metrics = self._metrics, dict(metrics)
        self._rewards.append(metrics.get("reward") or 0.0)
        self._progress.update(self._task, completed=step / self._pace.total)

    def sample(self, prompt: Text, completion: str, rewards: Mapping[str, float], advantage: float) -> None:
        body = Line()
        body.append(clean(shorten(last_words(prompt), 400)), style="dim")
        body.append("\n")
        body.append(clean(shorten(completion, 600)), style="bold")
        scores = "  ".join(f"{name} {number(value)}" for name, value in rewards.items())
        self._sample = Panel(
            body, title="a completion", subtitle=Line(f"{scores}  advantage {number(advantage)}"), border_style="dim"
        )

    def note(self, text: str) -> None:
        self._console.print(Line(clean(text)))

    def stop(self) -> None:
        if self._live.is_started:
            self._progress.update(self._task, description="stopped" if self._pace.left != "0:00" else "done")
            self._live.stop()

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress]
        if self._metrics:
            parts.insert(0, self._table())
        if self._sample is not None and self._console.height >= 30:
            parts.insert(-1, self._sample)
        return Group(*parts)

    def _table(self) -> RenderableType:
        """Metrics in as many columns as fit, as many rows as leave room for the rest."""
        names = ordered(self._metrics)
        columns = max(1, min(3, self._console.width // 42))
        rows = max(3, min(-(-len(names) // columns), self._console.height - 8))
        grid = Table.grid(expand=True, padding=(0, 2))
        for _ in range(columns):
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for r in range(rows):
            cells = [self._cell(names, c * rows + r) for c in range(columns)]
            grid.add_row(*cells)
        done = f"step {self._pace.done}/{self._pace.total}"
        return Panel(
            grid,
            title=Line(f"{self._title}  {done}"),
            subtitle=Line(f"reward {sparkline(self._rewards, 24)}"),
            border_style="cyan",
        )

    def _cell(self, names: Sequence[str], index: int) -> RenderableType:
        if index >= len(names):
            return ""
        name = names[index]
        value, before = self._metrics[name], self._before.get(name)
        row = Table.grid(expand=True)
        row.add_column(ratio=1, no_wrap=True, overflow="ellipsis", style="dim")
        row.add_column(justify="right", no_wrap=True)
        row.add_row(name, f"{number(value)} {trend(value, before)}")
        return row


class _Left(ProgressColumn):
    """Time left and seconds a step."""

    max_refresh = 0.5

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Line:
        if not self._pace.seconds_a_step:
            return Line(duration(task.elapsed or 0), style="cyan")
        return Line(f"{self._pace.seconds_a_step:.1f} s/step, {self._pace.left} left", style="cyan")


FIRST = ("reward", "reward_std", "loss", "kl", "grad_norm", "entropy", "eval/accuracy", "lr")


def ordered(metrics: Mapping[str, Any]) -> list[str]:
    """What people look at first, then groups by name."""
    return [n for n in FIRST if n in metrics] + sorted(n for n in metrics if n not in FIRST)


def trend(value: Any, before: Any) -> str:
    """An arrow for the change since the last step."""
    if not isinstance(value, int | float) or not isinstance(before, int | float) or value == before:
        return " "
    return "↑" if value > before else "↓"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of a number, the last `width` values or their means."""
    if not values:
        return ""
    per = max(1, -(-len(values) // width))
    means = [sum(values[i : i + per]) / len(values[i : i + per]) for i in range(0, len(values), per)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * len(means)
    return "".join(BARS[int((m - low) / (high - low) * (len(BARS) - 1))] for m in means)


def last_words(prompt: Text) -> str:
    """A prompt as text: a conversation's last message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def shorten(text: str, length: int) -> str:
    """The end of a long text is what was asked and answered last."""
    return text if len(text) <= length else "… " + text[-length:]


def clean(text: str) -> str:
    """Without control characters, which a model may write and a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)
