"""Views for terminals: the live view of a run, and a status line for other commands.

They fit the size of the terminal: nothing wraps.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text as Line

from grpocli.text import clean, format_duration, format_number, one_line, prompt_text, sparkline, trend
from grpocli.views.view import ProgressView, ShownCompletion, Stage, View, plain_view

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

FIXED = 4
"""Lines for progress, stage and reward, and an empty one: a terminal scrolls when its last line is written."""
COLUMN = 36
"""The width of a column of metrics."""

FIRST = (
    *("reward", "loss", "kl", "completions/mean_length", "lr", "time/step", "rewards/", "grad_norm", "entropy"),
    "optim/skipped_updates",
    *("eval/accuracy", "completions/clipped_ratio", "frac_reward_zero_std", "reward_std", "token_mult_prob_error"),
    *("clip_ratio/region_mean", "time/rollout", "time/train", "time/reward", "memory/peak_gib", "num_tokens"),
)
"""The order of metrics, the first of which are shown if there is no room for all; `rewards/`: means of rewards."""


def stage_line(stage: Stage, spinner: Spinner, console: Console) -> RenderableType:
    """The stage, its duration and its progress; cut off at the width of the terminal."""
    took = (format_duration(time.monotonic() - stage.since), "dim")
    text = Line.assemble(f"{stage.text}  ", took, f"  {stage}", no_wrap=True, overflow="ellipsis")
    row = Table.grid(padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(spinner.render(console.get_time()), text)
    return row


def reward_line(rewards: Sequence[float], width: int) -> RenderableType:
    """The curve of the reward, with its first and last value."""
    if not rewards:
        return Line("")
    ends = f"{format_number(rewards[0])} → {format_number(rewards[-1])}"
    curve = sparkline(rewards, max(0, min(60, width - len(ends) - 10)))
    return Line.assemble(("reward ", "bold"), (curve, "green"), f" {ends}", no_wrap=True, overflow="ellipsis")


def metrics_table(
    metrics: Mapping[str, Any], before: Mapping[str, Any], width: int, rows: int
) -> Iterable[RenderableType]:
    """As many metrics as fit, in the order of FIRST and then of their names, in columns from top to bottom."""
    columns = max(1, min(4, width // COLUMN))
    ranks = {name: rank for rank, name in enumerate(FIRST)}
    means = {name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")}
    ordered = sorted(metrics, key=lambda name: (ranks.get("rewards/" if name in means else name, len(FIRST)), name))
    names = ordered[: columns * max(0, rows)]
    height = -(-len(names) // columns)
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for row in range(height):
        grid.add_row(*[_cell(name, metrics[name], before.get(name)) for name in names[row::height]])
    if names:
        yield grid


def _cell(name: str, value: Any, before: Any) -> RenderableType:
    row = Table.grid(expand=True)
    row.add_column(ratio=1, no_wrap=True, overflow="ellipsis", style="dim")
    row.add_column(justify="right", no_wrap=True)
    unit = " s" if name.startswith("time/") else ""
    row.add_row(Line(one_line(name)), Line(f"{format_number(value)}{unit} {trend(value, before)}"))
    return row


def sample_panel(console: Console, sample: ShownCompletion, width: int, height: int) -> RenderableType:
    """The ends of prompt and completion and the reference answer, in at most `height` lines."""
    inner = width - 4
    prompt = _tail(console, prompt_text(sample.prompt), inner, max(1, height // 3), "dim")
    reference = [] if sample.answer is None else [Line(f"reference: {sample.answer}", "cyan", no_wrap=True)]
    for line in reference:
        line.truncate(inner - 2, overflow="ellipsis")
    room = height - len(prompt) - len(reference)
    completion = _tail(console, sample.completion or "(nothing)", inner, room, "")
    scores = "  ".join(f"{one_line(name)} {format_number(value)}" for name, value in sample.rewards.items())
    foot = Line(f"{scores}  advantage {format_number(sample.advantage)}", no_wrap=True, overflow="ellipsis")
    foot.truncate(max(1, inner - 2), overflow="ellipsis")
    body = Line("\n").join([*prompt, *completion, *reference])
    return Panel(Padding(body, 0), title="a completion", subtitle=foot, border_style="dim", width=width)


def _tail(console: Console, text: str, width: int, height: int, style: str) -> list[Line]:
    """The last lines of a wrapped text; `…` if there are more."""
    # cut first: wrapping a long text six times a second would be slow
    end = text.strip()[-width * height * 2 :]
    lines = [line for line in Line(end, style=style).wrap(console, width - 2) if line.plain.strip()] or [Line("")]
    if len(lines) > height:
        lines = lines[-height:]
        lines[0] = Line("… ", style=style) + lines[0]
    return lines


class StatusView(ProgressView):
    """One line with the current stage, which is removed at the end; notes scroll above it."""

    transient = True

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console, self._spinner = console, Spinner("dots")
        self._live = Live(
            self, console=console, refresh_per_second=6, transient=self.transient, vertical_overflow="crop"
        )
        self._live.start()
        atexit.register(self.stop)  # otherwise the cursor may stay hidden

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield stage_line(self._stage, self._spinner, console)

    def note(self, text: str) -> None:
        self._console.print(Line(clean(text)))

    def stop(self, last_line: str = "") -> None:
        atexit.unregister(self.stop)
        self._live.stop()


class LiveView(StatusView):
    """A run's metrics, progress, stage and a completion, redrawn in place at the size of the terminal."""

    transient = False

    def __init__(self, console: Console) -> None:
        # another thread draws these, so they are replaced and not changed
        self._title, self._over = "", False
        self._metrics: Mapping[str, Any] = {}
        self._before: Mapping[str, Any] = {}
        self._rewards: tuple[float, ...] = ()
        self._sample: ShownCompletion | None = None
        super().__init__(console)

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        self._title = one_line(title)
        super().start(title, plan, total_steps)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.step(step, metrics.get("time/step"))
        self._before, self._metrics = self._metrics, dict(metrics)
        reward = metrics.get("reward")
        if isinstance(reward, int | float) and reward == reward:
            self._rewards = (*self._rewards, float(reward))

    def sample(self, sample: ShownCompletion) -> None:
        self._sample = replace(
            sample,
            prompt=clean(prompt_text(sample.prompt)),
            completion=clean(sample.completion),
            answer=None if sample.answer is None else one_line(sample.answer),
        )

    def warn(self, text: str) -> None:
        self._console.print(Line(f"warning: {clean(text)}", style="yellow"))

    def stop(self, last_line: str = "") -> None:
        if self._live.is_started:
            self._stage.begin(last_line or ("done" if self._pace.finished else "stopped"))
            self._over = True
        super().stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sample, metrics, width = self._sample, self._metrics, options.max_width
        room = console.size.height - FIXED
        if sample and room >= 14 and width >= 30:
            body = min(12, room // 3)
            yield sample_panel(console, sample, width, body)
            room -= body + 2
        if metrics:
            yield from metrics_table(metrics, self._before, width, room)
            yield reward_line(self._rewards, width)
        yield self._progress(width)
        if self._over:
            text = self._stage.text
            yield Line(text, style="green" if text == "done" else "yellow", no_wrap=True)
        else:
            yield stage_line(self._stage, self._spinner, console)

    def _progress(self, width: int) -> RenderableType:
        pace = self._pace
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True, style="bold")
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        done = pace.done / pace.total if pace.total else 0.0
        name = f"{self._title}  {pace.count}" if width >= 76 and self._title else pace.count
        left = "" if self._over or pace.left is None else f"{format_duration(pace.left)} left"
        with_speed = pace.seconds_a_step is not None and (width >= 44 or not left)
        speed = f"{format_number(pace.seconds_a_step)} s/step" if with_speed else ""
        times = Line(", ".join(filter(None, (speed, left))), style="cyan")
        row.add_row(Line(name), ProgressBar(total=1.0, completed=done), times)
        return row


def make_view() -> View:
    """A live view if standard output is a terminal, plain lines elsewhere."""
    return _view(sys.stdout, LiveView)


def status_view() -> View:
    """The view of a command that does not train, on standard error: one line in a terminal, plain lines elsewhere."""
    return _view(sys.stderr, StatusView)


def _view(file: IO[str], in_terminal: type[StatusView]) -> View:
    from rich.console import Console

    console = Console(file=file)
    # not rich's check, which takes a file for a terminal if FORCE_COLOR is set
    return in_terminal(console) if file.isatty() and not console.is_dumb_terminal else plain_view(file)
