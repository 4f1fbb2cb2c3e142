"""What scores completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from grpocli.config.field_docs import summary
from grpocli.config.formula import Formula
from grpocli.config.parts import base, nearest, require, section
from grpocli.errors import ConfigError
from grpocli.rewards.final_answer import final_answer
from grpocli.types import Episode, Text


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as a reward sees it.

    prompt and completion are both strings (plain data), or both lists of messages (conversational data).
    text: the completion's text in either case; of several turns, the last one's. columns: the example's other columns.
    n_tokens: the completion's length. max_tokens: the limit it was sampled under. truncated: it was cut there.
    episode: what came of it in its task's environment, if there is one.
    """

    prompt: Text
    completion: Text
    text: str
    columns: dict[str, Any]
    token_ids: list[int]
    max_tokens: int
    truncated: bool
    episode: Episode | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def task(self) -> str:
        """The name of the task that it is of."""
        return str(self.columns.get("task_name", ""))


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that could not be scored: never a 0. `reason` is a phrase for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Overrun(Failure):
    """An item that its worker process did not finish before the deadline, or (late is False) crashed on."""

    late: bool = True


@dataclass(frozen=True, slots=True)
class Unreachable(Failure):
    """The scoring service was unavailable or busy at every retry; it may score this sample later."""


class Forfeit(float):
    """The score of a completion that took too long to score. It counts as wrong, not as a Failure.

    Otherwise a model that does not know the answer could escape its score. `reason` is a phrase for the user.
    """

    reason: str

    def __new__(cls, score: float, reason: str) -> Self:
        self = super().__new__(cls, score)
        self.reason = reason
        return self


Score = float | None | Failure  # None: does not apply to this sample
LARGEST = 1e12
"""Of a score: its square is still far from what float32 can hold."""


@base("reward")
@section("reward")
class BaseReward:
    """Base class of the config group `reward`; its choices are registered with `package="reward.NAME"`."""

    has_processes: ClassVar[bool] = False
    """It scores in worker processes, each sample by itself, so it is called group by group while other completions are
    still being sampled. Other rewards are called once, with all samples."""
    verifiable: ClassVar[bool] = False
    """It says whether an answer is right, so that `grpocli reward-check` can test it with the examples' answers."""
    solution_column: ClassVar[str] = ""
    """Column of the examples' answers for `grpocli reward-check`; empty: `answer_column`."""
    answer_forms: ClassVar[tuple[str, ...]] = ()
    """Other forms in which it reads an answer, by their names in `reward_validation.FORMS`."""

    weight: float = 1.0
    """Factor of this reward in the sum of a run's rewards."""

    def __post_init__(self) -> None:
        require(self, "weight", math.isfinite(self.weight), "must be a finite number")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order. An exception counts as a Failure of every sample."""
        raise NotImplementedError

    def vote(self, sample: Sample) -> str:
        """The answer that a sample gives, as text."""
        return final_answer(sample.text)

    def votes(self, samples: Sequence[Sample]) -> list[str]:
        """The answers of samples of one prompt, for a majority: equal texts are one answer."""
        return [self.vote(sample) for sample in samples]

    def explain(self, sample: Sample) -> str:
        """Why it scores a sample as it does, as a phrase; empty where there is no more to say than the score."""
        return ""

    def check_ready(self) -> None:
        """Raise ConfigError where this machine lacks something that the reward names. Loads nothing."""

    def check(self, columns: Sequence[str]) -> None:
        """Find out before training what cannot work with examples of these columns. Raises ConfigError."""
        wanted = getattr(self, "answer_column", None)
        if wanted is not None and wanted not in columns:
            key = f"{getattr(self, 'config_key', 'reward')}.answer_column"
            raise ConfigError(
                f"the task's examples have the columns {', '.join(columns)}{nearest(wanted, columns)}",
                key=key,
                value=wanted,
            )

    def close(self) -> None:
        """Stop what was started."""

    @property
    def warning(self) -> str:
        """What somebody who uses it as it is set should be told, as a sentence without its end."""
        return ""

    @property
    def label(self) -> str:
        """What an error calls it, beside its key."""
        return type(self).__name__


@section("reward")
class Correctness(BaseReward):
    """Base of rewards that say whether a completion is right.

    Evaluations count a score of 1 or more as right, so only `right` may reach that.
    """

    verifiable: ClassVar[bool] = True

    right: float = 1.0
    """Score of a right answer, at least 1."""
    wrong: float = 0.0
    """Score of a wrong answer, below 1."""
    answer_column: str = "answer"
    """Column of the example with the reference answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = "evaluations count a score of 1 or more as right"
        require(self, "right", 1 <= self.right < math.inf, f"must be a finite number of 1 or more: {reason}")
        require(self, "wrong", -math.inf < self.wrong < 1, f"must be a finite number below 1: {reason}")

    def formula(self) -> Formula:
        return Formula((summary(type(self)),), {"right": "right", "wrong": "wrong"})

    def value(self, correct: bool) -> float:
        """The score of a right or a wrong completion."""
        return self.right if correct else self.wrong


def answer_columns(rewards: Iterable[BaseReward]) -> tuple[str, ...]:
    """The examples' columns in which people will look for the reference answer, the likeliest first."""
    named = ((reward.solution_column, getattr(reward, "answer_column", "")) for reward in rewards)
    return tuple(dict.fromkeys([*(name for names in named for name in names if name), "answer"]))


def answer_of(sample: Sample, column: str) -> str | Failure:
    """The reference answer as text."""
    if sample.columns.get(column) is None:
        return Failure(f"the example has no value in the column {column!r}")
    answer = str(sample.columns[column])
    return answer if answer.strip() else Failure(f"the example has an empty text in the column {column!r}")


def as_score(value: Any) -> Score:
    """A returned value as a finite float or None; a Failure that says why where it is neither."""
    if value is None or isinstance(value, Failure | Forfeit):
        return value
    if not hasattr(value, "__float__"):
        return Failure(f"it returned {value!r}, which is no number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return Failure(f"it returned what is no number: {error}")
    if not math.isfinite(number):
        return Failure(f"it returned {number}")
    if abs(number) > LARGEST:
        return Failure(f"it returned {number:g}, beyond {LARGEST:g}, too large to train on")
    return number
