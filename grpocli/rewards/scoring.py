"""Scoring rollouts with all rewards of a run; what could not be scored is counted, never taken for a 0."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType

from grpocli.data import Rollout, Text
from grpocli.errors import RewardError
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score

logger = logging.getLogger(__name__)

LARGEST = 1e12
"""Of a reward: its square is still far from what float32 can hold."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What scoring took and could not do. errors, first: by reward, how many and the first one as a sentence."""

    samples: int = 0
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def then(self, later: Tally) -> Tally:
        """Both, one after the other."""
        return self._with(later, self.seconds + later.seconds)

    def beside(self, other: Tally) -> Tally:
        """Both, at the same time in two processes."""
        return self._with(other, max(self.seconds, other.seconds))

    def _with(self, other: Tally, seconds: float) -> Tally:
        errors = {n: self.errors.get(n, 0) + other.errors.get(n, 0) for n in [*self.errors, *other.errors]}
        return Tally(self.samples + other.samples, seconds, errors, other.first | self.first)

    @property
    def metrics(self) -> dict[str, float]:
        return {"time/reward": self.seconds} | {f"rewards/{n}/errors": float(k) for n, k in self.errors.items()}


@dataclass(frozen=True, slots=True)
class Scorer:
    """The rewards by name. A run stops when a larger share than `max_errors` of a step's samples fails.

    tasks: which rewards score a task's samples, by its name; all of them those of a task that is not in it.
    """

    rewards: dict[str, BaseReward]
    max_errors: float
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def early(self, rollouts: Sequence[Rollout], max_tokens: int) -> list[dict[str, Score]]:
        """Of some of a step's rollouts, the scores that need not wait for the others: of rewards with processes of
        their own."""
        samples = [sample_of(rollout, max_tokens) for rollout in rollouts]
        scores = {name: self._of(name, samples) for name, reward in self.rewards.items() if reward.has_processes}
        return [{name: found[i] for name, found in scores.items()} for i in range(len(samples))]

    def score(
        self, rollouts: Sequence[Rollout], max_tokens: int, known: Sequence[Mapping[str, Score]] | None = None
    ) -> tuple[list[dict[str, float]], Tally]:
        """Rewards by name for each rollout (NaN: does not apply, or failed), and what it took.

        max_tokens: the limit that the completions were sampled under. known: what each has of `early`.
        """
        start = time.perf_counter()
        samples = [sample_of(rollout, max_tokens) for rollout in rollouts]
        known = known or [{} for _ in samples]
        results: list[dict[str, float]] = [{} for _ in samples]
        errors, first = dict[str, int](), dict[str, str]()
        for name in self.rewards:
            others = iter(self._of(name, [s for s, k in zip(samples, known, strict=True) if name not in k]))
            scores = [k[name] if name in k else next(others) for k in known]
            failed = [(s, f) for s, f in zip(samples, scores, strict=True) if isinstance(f, Failure)]
            for sample, failure in failed[:3]:
                logger.warning("reward.%s could not score %s: %s", name, excerpt(sample.text), failure.reason)
            errors[name] = len(failed)
            if failed:
                first[name] = _sentence(*failed[0])
            for result, score in zip(results, scores, strict=True):
                result[name] = math.nan if score is None or isinstance(score, Failure) else score
        return results, Tally(len(samples), time.perf_counter() - start, errors, first)

    def judge(self, tally: Tally, expected: int = 0) -> None:
        """Raise RewardError, naming the reward and a sample, where too many could not be scored.

        expected: how many samples a whole step has, for a judgement before all of them are there.
        """
        for name, failed in tally.errors.items():
            if failed > self.max_errors * max(tally.samples, expected):
                raise RewardError(
                    f"reward.{name} ({self.rewards[name].label}) could not score {failed} of {tally.samples} samples, "
                    f"more than rollout.max_reward_errors={self.max_errors} allows: {tally.first[name]}"
                )

    def _of(self, name: str, samples: Sequence[Sample]) -> list[Score]:
        """Scores by one reward, which is shown only what it is for, and no episode that broke off."""
        given = [self._before(name, sample) for sample in samples]
        scores = iter(call(self.rewards[name], [s for s, g in zip(samples, given, strict=True) if g is ...]))
        return [next(scores) if score is ... else score for score in given]

    def _before(self, name: str, sample: Sample) -> Score | EllipsisType:
        """What is known without asking the reward; ... where that has to be done."""
        if name not in self.tasks.get(sample.columns.get("task_name", ""), self.rewards):
            return None
        if sample.episode and sample.episode.problem:
            return Failure(sample.episode.problem)
        return ...

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()


def call(reward: BaseReward, samples: Sequence[Sample]) -> list[Score]:
    """Scores that are numbers, None, or failures; whatever a reward raises or returns."""
    if not samples:
        return []
    try:
        return [_number(score) for score in reward(samples)]
    except (Exception, SystemExit) as error:
        logger.exception("%s raised", reward.label)
        return [Failure(f"it raised {type(error).__name__}: {' '.join(str(error).split())}")] * len(samples)


def sample_of(rollout: Rollout, max_tokens: int) -> Sample:
    """A rollout as rewards see it."""
    done, text = rollout.completion, rollout.text
    completion: Text = text if isinstance(rollout.prompt.text, str) else [{"role": "assistant", "content": text}]
    if done.episode:
        completion, text = list(done.episode.messages), done.episode.last
    return Sample(
        prompt=rollout.prompt.text,
        completion=completion,
        text=text,
        columns=rollout.prompt.columns,
        token_ids=done.token_ids,
        max_tokens=max_tokens,
        truncated=done.truncated,
        episode=done.episode,
    )


def excerpt(text: str, length: int = 80) -> str:
    """The beginning of a text, on one line."""
    return repr(text if len(text) <= length else text[:length] + "...")


def _sentence(sample: Sample, failure: Failure) -> str:
    return f"{failure.reason}; the first was the completion {excerpt(sample.text)} of {excerpt(str(sample.prompt))}"


def _number(score: Score) -> Score:
    if score is None or isinstance(score, Failure):
        return score
    if not hasattr(score, "__float__"):
        return Failure(f"it returned {score!r}, which is no number")
    try:
        value = float(score)
    except (TypeError, ValueError, OverflowError) as error:
        return Failure(f"it returned what is no number: {error}")
    if not math.isfinite(value):
        return Failure(f"it returned {value}")
    return (
        value if abs(value) <= LARGEST else Failure(f"it returned {value:g}, beyond {LARGEST:g}, too large to train on")
    )
