"""What a person sees of a run: a live view in a terminal, plain lines elsewhere, nothing in the other processes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from grpocli.files import FULL
from grpocli.tracking.text import clean, format_duration, format_number, one_line, prompt_text
from grpocli.types import Text

if TYPE_CHECKING:
    from rich.console import Console


logger = logging.getLogger(__name__)


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
            "" if left is None else f"{format_duration(left)} left",
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


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A completion to show, as the model wrote it. answer: the reference answer, where there is one."""

    prompt: Text
    completion: str
    rewards: Mapping[str, float]
    advantage: float
    answer: str | None = None


class View:
    """Shows nothing; PlainView, LiveView and StatusView do. Every method works before `start`."""

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        """The run's name, its batch plan, and how many steps it has."""

    def resumed(self, done_steps: int) -> None:
        """How many steps were done in earlier sessions."""

    def stage(self, text: str, fraction: float | None = None) -> None:
        """What is going on now, and how much of it is done (0 to 1)."""

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        """A `Progress` of the stage; may be called in any thread."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""

    def sample(self, sample: ShownCompletion) -> None:
        """A completion of the last step."""

    def note(self, text: str) -> None:
        """A sentence that stays."""

    def warn(self, text: str) -> None:
        """A sentence that stays, and that someone should act on."""

    def stop(self, last_line: str = "") -> None:
        """Leave the terminal as it was. Safe to call twice. last_line: what goes on without this view."""


class Pace:
    """Steps done, and the time left at the speed of the last steps."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.total = self.done = 0
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=20)
        self._last = clock()

    def step(self, step: int, seconds: float | None) -> None:
        """seconds: what the step took; None: all the time since the last."""
        now = self._clock()
        self._seconds.append(now - self._last if seconds is None else seconds)
        self.done, self._last = step, now

    @property
    def seconds_a_step(self) -> float | None:
        """Mean over the last steps; None before the first."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None

    @property
    def left(self) -> float | None:
        """Seconds until the last step is done; None where nobody can know."""
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


QUIET_SECONDS = 4.0
LONGEST_QUIET = 30.0
"""While a stage lasts, plain lines are a fifth of its time apart, but between these two."""
TICK_SECONDS = 0.5
SAMPLE_SECONDS = 30.0


class PlainView(View):
    """One line a step, for logs and pipes; a stage when it first begins and while it lasts, a sample now and then."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._pace = Pace(clock)
        self._stages: set[str] = set()
        self._current = CurrentStage(clock)
        self._said = self._next_sample = clock()
        self._saying = threading.RLock()
        self._over = threading.Event()

    def start(self, title: str, plan: Sequence[str], total_steps: int) -> None:
        self._pace.total = total_steps
        if plan:
            self._say(f"run {title}")
        for line in plan:
            self._say(f"  {line}")

    def resumed(self, done_steps: int) -> None:
        self._pace.done = done_steps
        if done_steps:
            self._say(f"going on after step {done_steps}")

    def stage(self, text: str, fraction: float | None = None) -> None:
        stage = self._current.begin(text, fraction)
        if stage.kind not in self._stages:  # those of a step come back sixty times and more: the first time is enough
            self._stages.add(stage.kind)
            self._say(f"{stage.kind} ...")

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        self._current.progress(done, total, unit, detail)

    def tick(self) -> None:
        """Print the stage and its progress, unless a line was printed lately."""
        now, stage = self._clock(), self._current.stage
        quiet = min(LONGEST_QUIET, max(QUIET_SECONDS, (now - stage.since) / 5))
        if not self._stages or now - self._said < quiet:
            return
        so_far = stage.progress(now)
        self._say(f"{stage.text} ... {so_far + ', ' if so_far else ''}{format_duration(now - stage.since)} so far")

    def keep_ticking(self) -> None:
        """Tick in a thread until `stop`."""

        def work() -> None:
            while not self._over.wait(TICK_SECONDS):
                self.tick()

        threading.Thread(target=work, name="view", daemon=True).start()

    def stop(self, last_line: str = "") -> None:
        self._over.set()
        if last_line:
            self._say(f"{last_line} ...")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.step(step, metrics.get("time/step"))
        parts = [f"{label} {format_number(metrics[key])}" for key, label in LINE_METRICS.items() if key in metrics]
        parts.append(f"{format_number(self._pace.seconds_a_step)} s/step")
        if self._pace.left is not None:
            parts.append(f"{format_duration(self._pace.left)} left")
        self._say(f"{self._pace.count}  {'  '.join(parts)}")

    def sample(self, sample: ShownCompletion) -> None:
        if self._clock() < self._next_sample:
            return
        self._next_sample = self._clock() + SAMPLE_SECONDS
        scores = "  ".join(f"{name} {format_number(value)}" for name, value in sample.rewards.items())
        said = f"{_quoted(prompt_text(sample.prompt))} -> {_quoted(sample.completion)}"
        reference = "" if sample.answer is None else f"  reference {_quoted(sample.answer)}"
        self._say(f"  {said}{reference}  {scores}  advantage {format_number(sample.advantage)}")

    def note(self, text: str) -> None:
        self._say(text)

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        with self._saying:
            self._said = self._clock()
            try:
                self._console.print(clean(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
                self._console.file.flush()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk below the terminal's file ends no run: nothing is written there any more."""
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
"""Metrics of a plain line, and what it calls them."""


def _quoted(text: str, longest: int = 60) -> str:
    """The end of a text on one line."""
    line = one_line(text)
    return f'"{line}"' if len(line) <= longest else f'"...{line[-longest:]}"'


def plain_view(file: IO[str]) -> PlainView:
    from rich.console import Console

    view = PlainView(Console(file=file, force_terminal=False, no_color=True, width=100_000))
    view.keep_ticking()
    return view


def silent_view() -> View:
    return View()
