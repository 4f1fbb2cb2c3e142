"""Counts of scoring errors and timeouts, over tasks, rounds of sampling and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grpocli.rewards.reward import Failure, Forfeit, Sample, Score, Unreachable


@dataclass(frozen=True, slots=True)
class ErrorLimit:
    """The share of samples that may fail to score, and the config key that sets it."""

    key: str
    share: float

    def __str__(self) -> str:
        return f"{self.key}={self.share:g}"


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Counts of one reward over the samples of one task.

    timed: whether the reward has a time limit for each sample. errors: samples that could not be scored, `unreachable`
    of them because a service was unavailable. timeouts: samples that are wrong because scoring took too long.
    silent: samples that the reward should score and for which it returned None.
    first_error, first_timeout: the first of these as a sentence.
    """

    timed: bool = False
    errors: int = 0
    unreachable: int = 0
    timeouts: int = 0
    silent: int = 0
    first_error: str = ""
    first_timeout: str = ""

    def __add__(self, later: RewardStats) -> RewardStats:
        return RewardStats(
            self.timed or later.timed,
            self.errors + later.errors,
            self.unreachable + later.unreachable,
            self.timeouts + later.timeouts,
            self.silent + later.silent,
            self.first_error or later.first_error,
            self.first_timeout or later.first_timeout,
        )

    @classmethod
    def of(cls, samples: Sequence[Sample], scores: Sequence[Score], timed: bool, silent: int) -> RewardStats:
        pairs = list(zip(samples, scores, strict=True))
        failed = [(sample, score) for sample, score in pairs if isinstance(score, Failure)]
        late = [(sample, score) for sample, score in pairs if isinstance(score, Forfeit)]
        return cls(
            timed,
            errors=len(failed),
            unreachable=sum(isinstance(failure, Unreachable) for _, failure in failed),
            timeouts=len(late),
            silent=silent,
            first_error=next((_sentence(sample, score.reason) for sample, score in failed), ""),
            first_timeout=next((_sentence(sample, score.reason) for sample, score in late), ""),
        )


@dataclass(frozen=True, slots=True)
class ScoreStats:
    """Counts over the samples of a round of sampling, or of a step.

    samples: number of samples by task. seconds: time that scoring took. rewards: counts by (reward, task).
    unscored: number of samples by task to which no reward applies.
    """

    samples: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    rewards: Mapping[tuple[str, str], RewardStats] = field(default_factory=dict)
    unscored: Counter[str] = field(default_factory=Counter)

    def add_round(self, later: ScoreStats) -> ScoreStats:
        """The summed counts of two rounds."""
        return self._plus(later, self.seconds + later.seconds)

    def add_process(self, other: ScoreStats) -> ScoreStats:
        """The counts of two processes that score at the same time."""
        return self._plus(other, max(self.seconds, other.seconds))

    def _plus(self, other: ScoreStats, seconds: float) -> ScoreStats:
        pairs = dict.fromkeys([*self.rewards, *other.rewards])
        rewards = {pair: self.of(*pair) + other.of(*pair) for pair in pairs}
        return ScoreStats(self.samples + other.samples, seconds, rewards, self.unscored + other.unscored)

    def of(self, reward: str, task: str) -> RewardStats:
        """The counts of a reward over one task."""
        return self.rewards.get((reward, task), RewardStats())

    def of_tasks(self, reward: str, tasks: Collection[str]) -> RewardStats:
        """The counts of a reward over several tasks."""
        return sum((self.of(reward, task) for task in tasks), RewardStats())

    def n_samples(self, tasks: Collection[str]) -> int:
        return sum(self.samples[task] for task in tasks)

    def errors_of(self, task: str) -> int:
        """The number of missing scores of a task's samples."""
        return sum(stats.errors for (_, of_task), stats in self.rewards.items() if of_task == task)

    @property
    def metrics(self) -> dict[str, float]:
        by_reward: dict[str, RewardStats] = {}
        for (name, _), stats in self.rewards.items():
            by_reward[name] = by_reward.get(name, RewardStats()) + stats
        errors = {f"rewards/{name}/errors": float(stats.errors) for name, stats in by_reward.items()}
        timeouts = {
            f"rewards/{name}/timeouts": float(stats.timeouts) for name, stats in by_reward.items() if stats.timed
        }
        return {"time/reward": self.seconds} | errors | timeouts


def _sentence(sample: Sample, reason: str) -> str:
    task = f" (task {sample.task})" if sample.task else ""
    first = f"the first was the completion {excerpt(sample.text)} of {excerpt(str(sample.prompt))}{task}"
    return f"{reason}; {first}"


def excerpt(text: str, length: int = 80) -> str:
    """The beginning of a text, on one line."""
    return repr(text if len(text) <= length else text[:length] + "...")
