"""The base class of rewards, the sample that a reward scores, and the scores that it returns."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Self

from grpocli.config.parts import base, nearest, part, require, section
from grpocli.errors import ConfigError
from grpocli.text import shorten
from grpocli.types import Episode, Rollout, Text


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as a reward sees it."""

    prompt: Text
    """A string (plain data), or a list of messages (conversational data)."""
    completion: Text
    """In the form of `prompt`."""
    text: str
    """The completion's text; in an episode of several turns, that of the last turn."""
    columns: dict[str, Any]
    """The other columns of the example."""
    token_ids: list[int]
    max_tokens: int
    """The length limit of sampling."""
    truncated: bool
    """Whether the completion was cut off at `max_tokens`."""
    episode: Episode | None = None
    """The result of the task's environment; None for a task without an environment."""
    mask: list[int] | None = None
    """1 for tokens of the model, 0 for the environment's; None: all 1."""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """For a reward that sees the group: the scores of the sample's other rewards by name, in the task's order; None
    where a reward does not apply or failed. Empty for any other reward."""

    @classmethod
    def of(cls, rollout: Rollout, max_tokens: int) -> Self:
        """The sample of a rollout that was drawn with the length limit `max_tokens`."""
        done, prompt, text = rollout.completion, rollout.prompt.text, rollout.text
        completion: Text = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        if done.episode:
            completion, text = list(done.episode.messages), done.episode.last
        return cls(
            prompt=prompt,
            completion=completion,
            text=text,
            columns=rollout.prompt.columns,
            token_ids=done.token_ids,
            max_tokens=max_tokens,
            truncated=done.truncated,
            episode=done.episode,
            mask=done.mask,
        )

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def n_written(self) -> int:
        """The number of tokens that the model wrote."""
        return self.n_tokens if self.mask is None else sum(self.mask)

    @property
    def task(self) -> str:
        """The name of the sample's task."""
        return str(self.columns.get("task_name", ""))


@dataclass(frozen=True, slots=True)
class Failure:
    """Marks a sample that could not be scored, which is not a score of 0."""

    reason: str
    """A phrase for the user."""


@dataclass(frozen=True, slots=True)
class Overrun(Failure):
    """A worker process missed the sample's deadline, or, with late=False, crashed on the sample."""

    late: bool = True


@dataclass(frozen=True, slots=True)
class Unreachable(Failure):
    """The scoring service was unavailable or busy at every retry; a later attempt may succeed."""


class Forfeit(float):
    """The score of a completion that took too long to score: a wrong answer, not a Failure.

    Otherwise a model that does not know the answer could avoid its score. reason: a phrase for the user.
    """

    reason: str

    def __new__(cls, score: float, reason: str) -> Self:
        self = super().__new__(cls, score)
        self.reason = reason
        return self


Score = float | None | Failure
"""A score; None if the reward does not apply to the sample."""
LARGEST_SCORE = 1e12
"""Its square is far below the largest float32."""
LITERAL = r"""'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?"""
"""A text in quotes. One that is not closed is taken, too, or each of its quotes would be tried as the first."""
NUMPY = re.compile(rf"""({LITERAL}|[}}\]])(\s+(?=['"{{\[]))?|\barray\(|,\s*dtype=\w+\)""", re.DOTALL)
"""A literal or a bracket, with the space that follows instead of a comma; what numpy writes around a list."""


@base("reward")  # config/parts.py explains these decorators
@section("reward")
class BaseReward:
    """Base class of the config group `reward`; its choices are registered with `package="reward.NAME"`."""

    config_key: ClassVar[str]
    """Config key of the reward, such as `reward.math`: set when the class is registered; in a run, `reward.NAME`."""
    scores_independently: ClassVar[bool] = False
    """Whether the reward scores each sample independently, outside of this process, and so is called group by group
    while other completions are still being sampled. Any other reward is called once, with all samples."""
    sees_group: ClassVar[bool] = False
    """Whether the reward is called once for each group, after the run's other rewards, with all samples of the group
    and their `scores`. It cannot measure accuracy."""
    repeatable: ClassVar[bool] = True
    """Whether another call scores the same samples alike, without a service outside of this machine."""
    checks_answers: ClassVar[bool] = False
    """Whether the reward decides if an answer is right, so that `grpocli reward-check` can test it."""
    solution_column: ClassVar[str] = ""
    """Column of the examples' answers for `grpocli reward-check`; empty: `answer_column`."""
    answer_forms: ClassVar[tuple[str, ...]] = ()
    """Names of the other formats of answers that the reward reads, which `grpocli reward-check` tests."""

    weight: float = 1.0
    """Factor of this reward in the sum of a run's rewards."""

    def __post_init__(self) -> None:
        require(self, "weight", math.isfinite(self.weight), "must be a finite number")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample, in order; by default `score_sample` of each.

        An exception counts as a Failure of every sample.
        """
        return [self.score_sample(sample) for sample in samples]

    def score_sample(self, sample: Sample) -> Score:
        """The score of one sample, in a reward that does not override `__call__`."""
        raise NotImplementedError

    def vote(self, sample: Sample) -> str:
        """The sample's answer, as text."""
        from grpocli.answers.final_answer import final_answer  # slow: its patterns are compiled

        return final_answer(sample.text)

    def votes(self, samples: Sequence[Sample]) -> list[str]:
        """The answers of samples of one prompt, for majority voting: equal texts are one answer."""
        return [self.vote(sample) for sample in samples]

    def explain(self, sample: Sample) -> str:
        """The reason for a sample's score, as a phrase; empty if the score needs no explanation."""
        return ""

    def check_ready(self) -> None:
        """Raise ConfigError if a file or folder that the config names is missing. Loads nothing."""

    def check(self, columns: Sequence[str]) -> None:
        """Raise ConfigError if the reward cannot score examples with these columns. Runs before training."""
        wanted = getattr(self, "answer_column", None)
        if wanted is not None and wanted not in columns:
            problem = f"the task's examples have the columns {', '.join(columns)}{nearest(wanted, columns)}"
            raise ConfigError(problem, key=f"{self.config_key}.answer_column", value=wanted)

    def close(self) -> None:
        """Stop worker processes and requests."""

    @property
    def warning(self) -> str:
        """A warning about these settings, as a sentence without a full stop; empty for none."""
        return ""

    @property
    def label(self) -> str:
        """Names the reward in error messages, beside its key."""
        return type(self).__name__


@section("reward")
class Correctness(BaseReward):
    """Base class of rewards that decide whether a completion is right.

    Evaluations count a score of 1 or more as right, so `right` must be at least 1 and `wrong` below 1.
    """

    checks_answers: ClassVar[bool] = True

    right: float = 1.0
    """Score of a right answer, at least 1."""
    wrong: float = 0.0
    """Score of a wrong answer, below 1."""
    answer_column: str = "answer"
    """Column of the example with the reference answer; of a list, any member is right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = "evaluations count a score of 1 or more as right"
        require(self, "right", 1 <= self.right < math.inf, f"must be a finite number of 1 or more: {reason}")
        require(self, "wrong", -math.inf < self.wrong < 1, f"must be a finite number below 1: {reason}")

    def score_sample(self, sample: Sample) -> Score:
        """The score by the accepted answer that fits best: a list in `answer_column` holds several."""
        answers = answers_of(sample, self.answer_column)
        if isinstance(answers, Failure):
            return answers
        return best_of([self.score_answer(sample, answer) for answer in answers])

    def score_answer(self, sample: Sample, answer: Any) -> Score:
        """The score by one accepted answer, in a reward that overrides neither `score_sample` nor `__call__`."""
        raise NotImplementedError

    def value(self, correct: bool) -> float:
        """The score of a right or a wrong completion."""
        return self.right if correct else self.wrong


@part("reward", "none", package="reward.none")
class NoReward(BaseReward):
    """Scores nothing, so a task needs no answers. For algorithm/advantage=none; such a run has no accuracy.

    It is the only reward of its run, which is built without rewards.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [None] * len(samples)


def seed_for(samples: Sequence[Sample]) -> int:
    """The seed of a reward's random numbers for these samples, so that a resumed run repeats them."""
    beginnings = [sample.token_ids[:16] for sample in samples]  # enough to differ between steps
    return zlib.crc32(repr(beginnings).encode())


def answer_columns(rewards: Iterable[BaseReward]) -> tuple[str, ...]:
    """The columns that may hold the reference answer, the most likely first."""
    named = ((reward.solution_column, getattr(reward, "answer_column", "")) for reward in rewards)
    return tuple(dict.fromkeys([*(name for names in named for name in names if name), "answer"]))


def accepted(value: Any) -> list[Any]:
    """The accepted answers in a column's value: the members of a list, or the value; without empty ones.

    A text that is a list of texts, such as '["5", "6"]', is that list; [5, 6] is not, but an interval or a pair.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy
    if isinstance(written := read_written(value), list) and all(isinstance(one, str) for one in written):
        value = written or value
    if isinstance(value, list | tuple):
        return [answer for one in value for answer in accepted(one)]
    return [value] if value == value and answer_text(value).strip() else []


def read_written(value: Any) -> Any:
    """The list or object that a text is in JSON, in Python, or as numpy and pandas print it; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{", "array(")):
        for read in (json.loads, _python):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                if isinstance(found := read(value.strip()), list | dict):
                    return found
    return value


def _python(text: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of an unknown escape, as in '\d'
        return ast.literal_eval(NUMPY.sub(_as_python, text))


def _as_python(found: re.Match[str]) -> str:
    if found[1]:
        return f"{found[1]}, " if found[2] else found[1]
    return "(" if found[0].startswith("array") else ")"


def answer_text(value: Any) -> str:
    """An answer as text: a number without a needless ".0", a truth value in lower case; empty for None."""
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return f"{int(value)}" if value == int(value) else f"{Decimal(f'{value:.15g}'):f}"
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def with_one_answer(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns with the first of several accepted answers as `answer`, for texts that have it in them.

    A text stays as it is: it may be the list that a task asks for.
    """
    answer = columns.get("answer")
    known = [answer] if isinstance(answer, str) else accepted(answer)
    return {**columns, "answer": answer_text(known[0])} if known else columns


def answers_of(sample: Sample, column: str) -> list[Any] | Failure:
    """The accepted answers, at least one: each a text, a number or a truth value."""
    answers = accepted(sample.columns.get(column))
    if objects := [one for one in answers if isinstance(one, dict)]:
        hint = f"task.answer_column=COLUMN.FIELD takes one of {', '.join(objects[0])}"
        return Failure(f"the answer in the column {column!r} is an object; {hint}")
    return answers or Failure(f"the example has no value in the column {column!r}")


def best_of(scores: Sequence[Score]) -> Score:
    """The highest score of a completion by its accepted answers, at least one; a Failure if there is none."""
    known = [score for score in scores if score is not None and not isinstance(score, Failure)]
    return max(known) if known else scores[0]


def as_score(value: Any) -> Score:
    """A reward's return value as a float or None; a Failure if it is no number of at most LARGEST_SCORE."""
    if value is None or isinstance(value, Failure | Forfeit):
        return value
    number = math.nan
    if hasattr(value, "__float__"):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if abs(number) <= LARGEST_SCORE:
        return number
    return Failure(f"it returned {shorten(repr(value), 80)}, expected a number of at most {LARGEST_SCORE:g}")
