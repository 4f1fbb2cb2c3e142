"""Counts of scoring errors and timeouts, the limits above which they end a run, and warnings about tolerated ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grpocli.errors import RewardError, RewardGone
from grpocli.rewards.reward import BaseReward, Failure, Forfeit, Sample, Score, Unreachable


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


@dataclass(frozen=True, slots=True)
class ErrorLimits:
    """The limits on scoring errors of a run.

    share: `rollout.max_reward_errors`. by_task: limits of tasks that have their own.
    """

    share: float
    by_task: Mapping[str, ErrorLimit] = field(default_factory=dict)

    def check(self, stats: ScoreStats, rewards: Mapping[str, BaseReward], expected: int = 0) -> None:
        """Raise RewardError if too many samples of a reward failed; RewardGone if the cause is an unavailable service.

        A task with its own limit is checked alone, all other tasks together.
        expected: number of samples of the whole step, to check a step that is not complete yet.
        """
        others = [task for task in stats.samples if task not in self.by_task]
        alone = [([task], self.by_task[task]) for task in stats.samples if task in self.by_task]
        for tasks, limit in [*alone, (others, ErrorLimit("rollout.max_reward_errors", self.share))]:
            scale = max(1.0, expected / max(stats.samples.total(), 1))
            allowed = limit.share * stats.n_samples(tasks) * scale
            for name, reward in rewards.items():
                found = stats.of_tasks(name, tasks)
                if found.errors > allowed:
                    kind = RewardError if found.errors - found.unreachable > allowed else RewardGone
                    raise kind(_failure_text(stats, name, reward, tasks, f", more than {limit} allows"))

    def tolerated_errors(self, stats: ScoreStats, rewards: Mapping[str, BaseReward]) -> dict[str, str]:
        """Warnings about errors that only a task's own limit allows."""
        return {
            f"errors {name} {task}": _failure_text(
                stats, name, reward, [task], f" of task {task}, which {limit} allows"
            )
            for task, limit in self.by_task.items()
            for name, reward in rewards.items()
            if stats.of(name, task).errors > self.share * stats.samples[task]
        }


def unscored_warnings(stats: ScoreStats) -> dict[str, str]:
    """Warnings about samples to which no reward applies."""
    text = "no reward applies to {} of {} samples of task {}: they give no training signal"
    found = {task: count for task, count in stats.unscored.items() if count}
    return {f"unscored {task}": text.format(count, stats.samples[task], task) for task, count in found.items()}


def silent_warning(stats: ScoreStats, name: str, reward: BaseReward, tasks: Collection[str]) -> dict[str, str]:
    """A warning if the reward returned None for every sample of its tasks, while other rewards scored some of them."""
    count = stats.of_tasks(name, tasks).silent
    if count != stats.n_samples(tasks) or count <= sum(stats.unscored[task] for task in tasks):
        return {}
    samples = f"all {count} samples of task {', '.join(tasks)}"
    return {
        f"silent {name}": f"reward.{name} ({reward.label}) returned None for {samples}: it does not affect their score"
    }


def timeout_warnings(stats: ScoreStats, rewards: Mapping[str, BaseReward]) -> dict[str, str]:
    """Warnings about samples that are wrong because scoring them took too long."""
    found = {}
    for (name, task), of_pair in stats.rewards.items():
        if of_pair.timeouts:
            samples = f"{of_pair.timeouts} of {stats.samples[task]} samples" + (f" of task {task}" if task else "")
            found[f"timeouts {name} {task}"] = (
                f"reward.{name} ({rewards[name].label}) scored {samples} as wrong because scoring them took too "
                f"long: {of_pair.first_timeout}"
            )
    return found


def _failure_text(stats: ScoreStats, name: str, reward: BaseReward, tasks: Collection[str], limit_text: str) -> str:
    found = stats.of_tasks(name, tasks)
    failed = f"could not score {found.errors} of {stats.n_samples(tasks)} samples"
    return f"reward.{name} ({reward.label}) {failed}{limit_text}: {found.first_error}"


def _sentence(sample: Sample, reason: str) -> str:
    task = f" (task {sample.task})" if sample.task else ""
    first = f"the first was the completion {excerpt(sample.text)} of {excerpt(str(sample.prompt))}{task}"
    return f"{reason}; {first}"


def excerpt(text: str, length: int = 80) -> str:
    """The beginning of a text, on one line."""
    return repr(text if len(text) <= length else text[:length] + "...")
