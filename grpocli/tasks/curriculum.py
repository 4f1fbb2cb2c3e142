"""Which task and which problem is drawn next: by the seed and a counter, or by the scores of all problems so far.

The scores of a step (task.order=difficulty, task.no_resampling_pass_rate) become known when all of its completions are
scored. The next step's draws use them, also when that step is collected ahead: steps are collected one after the other.
So a draw depends only on the seed, the number of the draw and the scores of earlier steps.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from grpocli.errors import ConfigError
from grpocli.types import Prompt

Rows: TypeAlias = NDArray[np.int64]
FILE = "problems.safetensors"
"""The scores of all tasks, in a checkpoint."""
KINDS = {"row": np.int64, "completions": np.int64, "right": np.int64, "last": np.float64, "step": np.int64}
"""The columns of `ProblemScores.table` and their types."""
UNKNOWN = 0.5
"""The pass rate of a problem without a score: in the middle, between problems that are known to be easy and hard."""
TRIES = 10_000
"""Consecutive rows that may be too long or held out, at most."""
GOLDEN = 2654435769
"""2**32 divided by the golden ratio: its multiples, modulo 2**32, are spread evenly."""
Saved: TypeAlias = dict[str, NDArray[Any]]
"""The scores of a task's problems in a checkpoint, one value for each problem in each column of KINDS. With an order of
its own also `position` [3] and `taken`, of `Position`."""
DIGITS = re.compile(r"(\d+)", re.ASCII)


def permutation(n: int, *seed: int) -> Rows:
    """The numbers below n, in an order that depends only on n and the seed."""
    # numpy guarantees the raw bits of a generator between versions, but not its permutations
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(bits, kind="stable")


class Order:
    """Draws each of n examples once per epoch, in a new order each time."""

    def __init__(self, n: int, seed: int, *streams: int) -> None:
        """n >= 1 examples, seed >= 0; streams: further numbers that the order depends on."""
        self.n, self.seed = n, (seed, *streams)
        self._epoch, self._permutation = -1, np.arange(0)

    def index(self, draw: int) -> int:
        """The index of the example for a draw, counted from 0."""
        epoch, place = divmod(draw, self.n)
        return int(self.epoch(epoch)[place])

    def epoch(self, epoch: int) -> Rows:
        """The indices in the order of an epoch."""
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, permutation(self.n, *self.seed, epoch)
        return self._permutation


class TaskScheduler:
    """Assigns draws to tasks in proportion to their weights.

    It uses a low-discrepancy sequence: in any run of draws each task has its share, to within a few draws.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.weights = list(weights)
        self._edges = np.cumsum(weights) / np.sum(weights)
        self._start = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._task, self._nth = np.empty(0, np.int64), np.empty(0, np.int64)

    def of(self, draw: int) -> tuple[int, int]:
        """The index of a draw's task, and the number of earlier draws of that task."""
        self._assign(draw + 1)
        return int(self._task[draw]), int(self._nth[draw])

    def drawn(self, draws: int) -> list[int]:
        """How many of the first `draws` draws each task has."""
        self._assign(draws)
        return [int(n) for n in np.bincount(self._task[:draws], minlength=len(self._edges))]

    def _assign(self, draws: int) -> None:
        """Compute the tasks of at least the first `draws` draws."""
        if draws <= len(self._task):
            return
        draws = max(2 * draws, 1024)
        place = (np.arange(draws, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(self._start)) % np.uint64(2**32)
        self._task = np.searchsorted(self._edges[:-1], place / 2**32, side="right")
        self._nth = np.empty(draws, np.int64)
        for task in range(len(self._edges)):
            (own,) = np.nonzero(self._task == task)
            self._nth[own] = np.arange(len(own))


@dataclass(slots=True)
class ProblemScores:
    """The scores of one task's problems, by the number of their row."""

    _of: dict[int, tuple[int, int, float, int]] = field(default_factory=dict)
    """{row: (its scored completions so far, those that the accuracy reward calls right, the share of right ones in its
    last group, the step for which that group was sampled)}."""

    def __len__(self) -> int:
        return len(self._of)

    def add(self, row: int, completions: int, right: int, step: int) -> None:
        """Add a group. One without scored completions says nothing about its problem."""
        if completions:
            n, c, *_ = self._of.get(row, (0, 0))
            self._of[row] = (n + completions, c + right, right / completions, step)

    def pass_rate(self, row: int) -> float | None:
        """The share of right completions of a problem; None before the first."""
        if row not in self._of:
            return None
        completions, right, *_ = self._of[row]
        return right / completions

    def solved(self, rows: Rows, least: float, since: int) -> NDArray[np.bool_]:
        """Which problems had a pass rate of at least `least` in their last group, sampled after step `since`."""
        last = (self._of.get(row, (0, 0, -math.inf, 0)) for row in rows.tolist())
        return np.array([share >= least and step > since for _, _, share, step in last], bool)

    @property
    def rows(self) -> Rows:
        """The rows of the problems that have a score, in the order of their first one."""
        return np.array(list(self._of), np.int64)

    @property
    def table(self) -> Saved:
        """A copy of all scores, for a checkpoint."""
        columns = zip(*((row, *scores) for row, scores in self._of.items()), strict=True) if self._of else [()] * 5
        return {name: np.array(column, kind) for (name, kind), column in zip(KINDS.items(), columns, strict=True)}

    @classmethod
    def of(cls, table: Mapping[str, NDArray[Any]]) -> ProblemScores:
        """The scores of a `table`."""
        columns = [table[name].tolist() for name in KINDS]
        return cls({row: tuple(scores) for row, *scores in zip(*columns, strict=True)})


@dataclass(slots=True)
class Position:
    """How far a task's order has come."""

    epoch: int = 0
    """Passes over the data before this one."""
    start: int = 0
    """The first row of the block that is drawn from; 0 for data that is read whole."""
    taken: list[int] = field(default_factory=list)
    """Rows of this block that are drawn."""
    woke: int = 0
    """The last step after which all problems rested and were woken; 0: none."""

    @property
    def arrays(self) -> Saved:
        """A copy, for a checkpoint."""
        return {
            "position": np.array([self.epoch, self.start, self.woke], np.int64),
            "taken": np.array(self.taken, np.int64),
        }

    @classmethod
    def of(cls, saved: Mapping[str, NDArray[Any]]) -> Position:
        """The position of `arrays`."""
        epoch, start, woke = saved["position"].tolist()
        return cls(epoch, start, saved["taken"].tolist(), woke)


class Problems(Protocol):
    """The training problems of a task, in blocks that are drawn one after the other.

    Data that is read whole is one block; a stream has one for each `task.shuffle_buffer` rows.
    """

    block: int
    """Rows of a block; for data that is read whole, at least one more than the largest row."""
    report: str
    """A sentence about long prompts; empty if there are none."""

    def draw(self, nth: int, uid: str) -> Prompt:
        """The nth prompt of this task, in an order that scores do not change."""
        ...

    def rows(self, epoch: int, start: int, shuffled: bool) -> Rows:
        """The rows of the block that begins at `start`, in their order in an epoch; empty after the end of the data."""
        ...

    def problem(self, row: int, uid: str) -> Prompt | None:
        """The prompt of a row; None if it is too long or held out, or there is no such row."""
        ...

    def values(self, start: int, column: str) -> Mapping[int, tuple[Any, str]]:
        """{row: (its value in a column, the name of the row in errors)} of a block; None without the column."""
        ...

    def position(self, nth: int) -> Position:
        """The position of the shuffled order before its nth draw."""
        ...

    def unusable(self) -> ConfigError:
        """The error for data without a usable row."""
        ...


@dataclass(frozen=True, slots=True)
class OrderKeys:
    """The keys of a task's order, as `BaseTask` documents them."""

    order: str = "shuffled"
    difficulty_column: str | None = None
    no_resampling_pass_rate: float | None = None

    @classmethod
    def of(cls, task: object) -> OrderKeys:
        """The keys of a task, which a task of a user may lack."""
        return cls(**{name: getattr(task, name) for name in cls.__slots__ if hasattr(task, name)})

    def counts(self, streaming: bool) -> bool:
        """Whether the problem of a draw follows from the draw's number alone."""
        # a stream in the order of the file skips unusable rows, so a row's place depends on the rows before it
        by_rows_before = self.order == "difficulty" or (self.order == "file" and streaming)
        return not by_rows_before and self.no_resampling_pass_rate is None


@dataclass(slots=True)
class ProblemOrder:
    """Draws the problems of one task whose order depends on more than the draw's number.

    An epoch has each problem once, but resting ones.
    """

    blocks: Problems
    keys: OrderKeys
    scores: ProblemScores
    step: int = 0
    """The last step whose scores are known."""
    woken: bool = False
    """Whether all problems rested in this step."""
    rates: list[float] = field(default_factory=list)
    """The pass rates of the problems that this step drew."""
    at: Position = field(default_factory=Position)
    _next: deque[int] | None = None

    def begin_step(self, collected: int) -> None:
        """From now on draws use the scores of the steps collected so far."""
        self.step, self._next, self.woken, self.rates = collected, None, False, []

    def draw(self, uid: str) -> Prompt:
        """The prompt of the next problem. Raises ConfigError if no row of the data is usable."""
        first, rested, tries = self.at.epoch, False, 0
        while True:
            if self._next is None:
                self._next, resting = self._rest_of_block()
                rested |= resting
            while self._next:
                row = self._next.popleft()
                self.at.taken.append(row)
                if prompt := self.blocks.problem(row, uid):
                    if (rate := self.scores.pass_rate(row)) is not None:
                        self.rates.append(rate)
                    return prompt
                if (tries := tries + 1) >= TRIES:
                    raise self.blocks.unusable()
            self._advance()
            if self.at.epoch > first + 1:  # a whole epoch without a problem
                if not rested:
                    raise self.blocks.unusable()
                first, rested, self.at.woke, self.woken = self.at.epoch, False, self.step, True

    def _rest_of_block(self) -> tuple[deque[int], bool]:
        """The rest of the block, ordered by the known scores, and whether a problem of it rests."""
        rows = self.blocks.rows(self.at.epoch, self.at.start, self.keys.order != "file")
        rows = rows[~np.isin(rows, np.array(self.at.taken, np.int64))]
        resting = self._resting(rows)
        rows = rows[~resting]
        if self.keys.order == "difficulty":
            rows = rows[np.argsort(self._difficulties(rows), kind="stable")]
        return deque(rows.tolist()), bool(resting.any())

    def _advance(self) -> None:
        """Go on to the next block, or to the next epoch."""
        at = self.at
        at.start, at.taken, self._next = at.start + self.blocks.block, [], None
        if not len(self.blocks.rows(at.epoch, at.start, False)):
            at.epoch, at.start = at.epoch + 1, 0

    def _difficulties(self, rows: Rows) -> list[float]:
        if column := self.keys.difficulty_column:
            ranks = difficulty_ranks(self.blocks.values(self.at.start, column.removeprefix("-")), column)
            return [ranks[row] for row in rows.tolist()]
        rates = [self.scores.pass_rate(row) for row in rows.tolist()]
        return [-(UNKNOWN if rate is None else rate) for rate in rates]

    def _resting(self, rows: Rows) -> NDArray[np.bool_]:
        least = self.keys.no_resampling_pass_rate
        return np.zeros(len(rows), bool) if least is None else self.scores.solved(rows, least, self.at.woke)

    @property
    def resting(self) -> int | None:
        """The number of problems that rest; None without `no_resampling_pass_rate`."""
        return None if self.keys.no_resampling_pass_rate is None else int(self._resting(self.scores.rows).sum())


def difficulty_ranks(values: Mapping[int, tuple[Any, str]], column: str) -> dict[int, float]:
    """{row: rank} by the values of a column, the easiest first. A column with a leading `-` falls with difficulty.

    Numbers, also as text, are compared as numbers; other text is compared as text, and the numbers in it as numbers
    (`Level 2` comes before `Level 10`). Raises ConfigError for a missing value, or for numbers beside text.
    """
    sign = -1.0 if column.startswith("-") else 1.0
    numbers = {row: _number(value) for row, (value, _) in values.items()}
    if None not in numbers.values():
        return {row: sign * number for row, number in numbers.items() if number is not None}
    for row, number in numbers.items():
        value, where = values[row]
        if number is not None or not isinstance(value, str) or not value:
            problem = f"{where} has {value!r:.60} there; it must hold a number in every row, or a text in every row"
            raise ConfigError(problem, key="task.difficulty_column", value=column)
    parts = {row: DIGITS.split(value) for row, (value, _) in values.items()}
    # text and runs of digits alternate, so two keys can be compared
    keys = {row: tuple(int(one[:4000]) if i % 2 else one for i, one in enumerate(own)) for row, own in parts.items()}
    rank = {key: sign * i for i, key in enumerate(sorted(set(keys.values())))}
    return {row: rank[key] for row, key in keys.items()}


def _number(value: Any) -> float | None:
    with suppress(ValueError, OverflowError, TypeError):
        if not isinstance(value, bytes) and not math.isnan(number := float(value)):
            return number
    return None


class Outcome(NamedTuple):
    """The result of a sampled group: how many completions could be scored, and how many of these are right."""

    task: str
    row: int
    completions: int
    right: int


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The scores of all problems of a run, by task, and the orders of the tasks that use them."""

    scores: dict[str, ProblemScores] = field(default_factory=dict)
    orders: dict[str, ProblemOrder] = field(default_factory=dict)

    def begin_step(self, collected: int) -> None:
        """Let draws use the scores of the steps collected so far."""
        for order in self.orders.values():
            order.begin_step(collected)

    def end_step(self, step: int, outcomes: Iterable[Outcome]) -> None:
        """Make the scores of a step known."""
        for one in outcomes:
            if one.task in self.scores:
                self.scores[one.task].add(one.row, one.completions, one.right, step)

    def metrics(self) -> dict[str, float]:
        """Of the step that ended last. `curriculum/pass_rate`: of the drawn problems, as known when they were drawn."""
        resting = [order.resting for order in self.orders.values() if order.resting is not None]
        rates = [rate for order in self.orders.values() for rate in order.rates]
        return {
            **({"curriculum/resting": float(sum(resting))} if resting else {}),
            **({"curriculum/pass_rate": float(np.mean(rates))} if rates else {}),
        }

    def warnings(self) -> dict[str, str]:
        """Sentences about tasks whose problems all rested in this step, by task."""
        return {
            f"curriculum/{name}": f"all problems of {name} rested: each reached no_resampling_pass_rate="
            f"{order.keys.no_resampling_pass_rate:g}; they are drawn again"
            for name, order in self.orders.items()
            if order.woken
        }

    def state(self) -> dict[str, Saved]:
        """A copy of the scores and positions, by task, for a checkpoint."""
        positions = {name: order.at.arrays for name, order in self.orders.items()}
        return {name: {**scores.table, **positions.get(name, {})} for name, scores in self.scores.items()}

    def restore(self, saved: Mapping[str, Saved], drawn: Mapping[str, int]) -> None:
        """Continue with the saved scores.

        drawn: the number of earlier draws of each task, which is the position of a task that has none saved: its order
        was a function of the draw's number.
        """
        for name in self.scores:
            self.scores[name] = ProblemScores.of(saved[name]) if name in saved else ProblemScores()
        for name, order in self.orders.items():
            own, order.scores = saved.get(name, {}), self.scores[name]
            order.at = Position.of(own) if "position" in own else order.blocks.position(drawn[name])
            order.at.start -= order.at.start % order.blocks.block  # a resume may have changed a stream's blocks


def outcomes_of(prompts: Sequence[Prompt], accuracies: Sequence[Sequence[float]]) -> list[Outcome]:
    """The outcomes of groups. accuracies: of each completion; NaN if it was not scored."""
    found = []
    for prompt, scores in zip(prompts, accuracies, strict=True):
        if prompt.row is not None:
            known = [score for score in scores if not math.isnan(score)]
            found.append(Outcome(prompt.task, prompt.row, len(known), sum(score >= 1 for score in known)))
    return found


def save_problems(problems: Mapping[str, Saved], folder: Path) -> None:
    """Write the scores of each task into a checkpoint."""
    from safetensors.numpy import save_file

    save_file({f"{task}.{name}": array for task, own in problems.items() for name, array in own.items()}, folder / FILE)


def load_problems(folder: Path) -> dict[str, Saved]:
    """The scores of a checkpoint by task; empty for one without scores."""
    from safetensors.numpy import load_file

    found: dict[str, Saved] = {}
    for name, array in load_file(folder / FILE).items() if (folder / FILE).exists() else ():
        task, _, own = name.rpartition(".")
        found.setdefault(task, {})[own] = array
    return found
