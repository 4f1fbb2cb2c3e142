"""Views of a run: stages with their progress, and plain lines for logs and pipes.

live_view.py has those for terminals.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rich.progress import Progress

from grpocli.files import FULL
from grpocli.text import clean, format_duration, format_number, one_line, prompt_text
from grpocli.types import Text

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class Stage:
    """The current stage of a run, such as sampling. Any thread may report its progress, from which rich estimates."""

    def __init__(self, clock: Clock = time.monotonic, text: str = "starting") -> None:
        self._clock, self._lock = clock, threading.RLock()  # otherwise a late report could be of the previous stage
        self._tasks = Progress(get_time=clock, speed_estimate_period=math.inf)
        self._start(text)

    def _start(self, text: str) -> None:
        self.text, self.since = text, self._clock()
        self._count("")

    def _count(self, unit: str) -> None:
        """Count from 0. rich takes no rate from the first report, as reading prompts comes before it."""
        for task in self._tasks.task_ids:
            self._tasks.remove_task(task)
        self._task, self._unit, self._detail = self._tasks.add_task("", total=None), unit, ""

    @property
    def kind(self) -> str:
        """The text up to the first comma, after which there is a count."""
        return self.text.partition(",")[0]

    def begin(self, text: str, fraction: float | None = None) -> None:
        """Begin a stage, or update the count of the current one. fraction: the share that is done, from 0 to 1."""
        with self._lock:
            if text.partition(",")[0] != self.kind:
                self._start(text)
            self.text = text
            if fraction is not None:
                self.progress(fraction, 1.0, "")

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """A `Progress` callback."""
        with self._lock:
            if unit != self._unit or done < self._tasks.tasks[0].completed:
                self._count(unit)
            self._tasks.update(self._task, completed=done, total=total or None)
            self._detail = detail

    def __str__(self) -> str:
        """`312/1,280 completions, 24%, 2:05 left, token 12 of at most 256`; empty without progress."""
        with self._lock:
            task, unit, detail = self._tasks.tasks[0], self._unit, self._detail
        total, left = task.total, task.time_remaining
        parts = (
            f"{int(task.completed):,}/{total:,.0f} {unit}" if unit and total else unit,
            f"{task.percentage:.0f}%" if total else "",
            "" if left is None else f"{format_duration(left)} left",
            detail,
        )
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A completion to show, as the model wrote it. answer: the reference answer, if known."""

    prompt: Text
    completion: str
    rewards: Mapping[str, float]
    advantage: float
    answer: str | None = None


class View:
    """A view that shows nothing, and the interface of PlainView, LiveView and StatusView."""

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        """Show the name of the run, the lines of its plan, and its number of steps. Other methods may come before."""

    def resumed(self, done_steps: int) -> None:
        """Show how many steps were done in earlier sessions."""

    def ends_after(self, steps: int) -> None:
        """Count to this number of steps from now on: the run ends early."""

    def stage(self, text: str, fraction: float | None = None) -> None:
        """Begin a stage. fraction: the share of it that is done, from 0 to 1."""

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """A `Progress` callback of the stage, for any thread."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""

    def sample(self, sample: ShownCompletion) -> None:
        """Show a completion of the last step."""

    def note(self, text: str) -> None:
        """Show a sentence that stays."""

    def warn(self, text: str) -> None:
        """Show a warning that stays."""

    def stop(self, last_line: str = "") -> None:
        """End the view and restore the terminal; twice does no harm. last_line: what happens next, without it."""


class Pace:
    """Steps done, and the time left at the speed of the last steps."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.total = self.done = 0
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=20)
        self._last = clock()

    def step(self, step: int, seconds: float | None) -> None:
        """Count a step. seconds: its duration; None: the time since the last one."""
        now = self._clock()
        self._seconds.append(now - self._last if seconds is None else seconds)
        self.done, self._last = step, now

    @property
    def seconds_a_step(self) -> float | None:
        """The mean over the last steps; None before the first."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None

    @property
    def left(self) -> float | None:
        """Seconds until the last step is done; None if unknown."""
        if self.seconds_a_step is None or not self.total:
            return None
        return max(0.0, (self.total - self.done) * self.seconds_a_step - (self._clock() - self._last))

    @property
    def count(self) -> str:
        """`step 3/60`."""
        return f"step {self.done:>{len(str(self.total))}}/{self.total}" if self.total else f"step {self.done}"

    @property
    def finished(self) -> bool:
        return 0 < self.total <= self.done


class ProgressView(View):
    """A view that knows the current stage and the pace of the steps, and shows all else as notes."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._pace, self._stage = Pace(clock), Stage(clock)

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        self._pace.total = total_steps
        if plan:
            self.note("\n".join([f"run {title}", *(f"  {line}" for line in plan)]))

    def resumed(self, done_steps: int) -> None:
        self._pace.done = done_steps
        if done_steps:
            self.note(f"going on after step {done_steps}")

    def ends_after(self, steps: int) -> None:
        self._pace.total = steps

    def stage(self, text: str, fraction: float | None = None) -> None:
        self._stage.begin(one_line(text), fraction)

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        self._stage.progress(done, total, unit, one_line(detail))

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")


QUIET_SECONDS = 10.0
"""While a stage lasts, lines are so far apart; completions three times as far."""


class PlainView(ProgressView):
    """One line per step; a line when a stage first begins and while it lasts; a completion now and then."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._console, self._clock = console, clock
        self._stages: set[str] = set()
        self._printed_at = self._next_sample = clock()
        self._print_lock = threading.RLock()
        self._stopped = threading.Event()

    def stage(self, text: str, fraction: float | None = None) -> None:
        super().stage(text, fraction)
        if self._stage.kind not in self._stages:  # they recur in every step: the first time is enough
            self._stages.add(self._stage.kind)
            self.note(f"{self._stage.kind} ...")

    def tick(self) -> None:
        """Print the stage and its progress, unless a line was printed a short time ago."""
        now, stage = self._clock(), self._stage
        if not self._stages or now - self._printed_at < QUIET_SECONDS:
            return
        took = f"{format_duration(now - stage.since)} so far" if now - stage.since >= 1 else ""
        self.note(f"{stage.text} ... {', '.join(filter(None, (str(stage), took)))}".rstrip())

    def keep_ticking(self) -> None:
        """Tick in a thread until `stop`."""

        def work() -> None:
            while not self._stopped.wait(QUIET_SECONDS / 10):
                self.tick()

        threading.Thread(target=work, name="view", daemon=True).start()

    def stop(self, last_line: str = "") -> None:
        self._stopped.set()
        if last_line:
            self.note(f"{last_line} ...")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.step(step, metrics.get("time/step"))
        parts = [f"{label} {format_number(metrics[key])}" for key, label in LINE_METRICS.items() if key in metrics]
        parts.append(f"{format_number(self._pace.seconds_a_step)} s/step")
        if self._pace.left is not None:
            parts.append(f"{format_duration(self._pace.left)} left")
        self.note(f"{self._pace.count}  {'  '.join(parts)}")

    def sample(self, sample: ShownCompletion) -> None:
        if self._clock() < self._next_sample:
            return
        self._next_sample = self._clock() + 3 * QUIET_SECONDS
        scores = [f"{name} {format_number(value)}" for name, value in sample.rewards.items()]
        facts = "  ".join([*scores, f"advantage {format_number(sample.advantage)}"])
        said = f"{_quoted(prompt_text(sample.prompt))} -> {_quoted(sample.completion)}"
        reference = "" if sample.answer is None else f"  reference {_quoted(sample.answer)}"
        self.note(f"  {said}{reference}  {facts}")

    def note(self, text: str) -> None:
        with self._print_lock:
            self._printed_at = self._clock()
            try:
                self._console.print(clean(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
                self._console.file.flush()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                logger.warning("standard output cannot be written (%s): the run goes on without it", error.strerror)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._console.file.fileno())
                os.close(null)


LINE_METRICS = {
    "reward": "reward",
    "loss": "loss",
    "kl": "kl",
    "completions/mean_length": "length",
    "eval/accuracy": "accuracy",
}
"""The metrics of a step's line, and their labels."""


def _quoted(text: str) -> str:
    """The end of a text, quoted, on one line."""
    line = one_line(text)
    return f'"{line}"' if len(line) <= 60 else f'"...{line[-60:]}"'


def plain_view(file: IO[str]) -> PlainView:
    from rich.console import Console

    view = PlainView(Console(file=file, force_terminal=False, no_color=True, width=100_000))
    view.keep_ticking()
    return view
