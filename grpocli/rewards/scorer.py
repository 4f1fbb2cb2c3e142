"""Scores rollouts with all rewards of a run. A sample that cannot be scored is counted, never scored 0.

`Scorer.add_scores` gives a `ScoredRollout` the scores that it lacks. `StreamingScorer` calls it for the groups that
have arrived, with the rewards that score samples independently, and at the end for all rollouts, with all rewards.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field, replace
from itertools import groupby
from types import TracebackType
from typing import Any, Self

from grpocli.config.user_code import keep_random_state, raised
from grpocli.errors import RewardError, RewardGone
from grpocli.progress import Progress, unreported
from grpocli.rewards.reward import BaseReward, Failure, Forfeit, Sample, Score, Unreachable, as_score, seed_for
from grpocli.text import shorten
from grpocli.types import Completion, Rollout

logger = logging.getLogger(__name__)

BATCH = 256
"""Samples in one call of a reward with worker processes; progress is reported between calls."""


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Counts of one reward over the samples of one task."""

    errors: int = 0
    """Samples that could not be scored."""
    unreachable: int = 0
    """Those of them that failed because a service was unavailable."""
    timeouts: int = 0
    """Samples that are wrong because scoring took too long."""
    silent: int = 0
    """Samples that the reward should score and for which it returned None."""
    first_error: str = ""
    """The first error as a sentence."""
    first_timeout: str = ""
    """The first timeout as a sentence."""

    def __add__(self, later: RewardStats) -> RewardStats:
        pairs = zip(astuple(self), astuple(later), strict=True)
        summed: list[Any] = [a or b if isinstance(a, str) else a + b for a, b in pairs]
        return RewardStats(*summed)


@dataclass(frozen=True, slots=True)
class ScoreStats:
    """Counts over the samples of a round of sampling, or of a step."""

    samples: Counter[str] = field(default_factory=Counter)
    """Number of samples by task."""
    seconds: float = 0.0
    """Time that scoring took."""
    rewards: Mapping[tuple[str, str], RewardStats] = field(default_factory=dict)
    """Counts by (reward, task)."""

    def add_round(self, later: ScoreStats) -> ScoreStats:
        """The summed counts of two rounds."""
        pairs = dict.fromkeys([*self.rewards, *later.rewards])
        rewards = {pair: self.of(*pair) + later.of(*pair) for pair in pairs}
        return ScoreStats(self.samples + later.samples, self.seconds + later.seconds, rewards)

    def add_process(self, other: ScoreStats) -> ScoreStats:
        """The counts of two processes that score at the same time."""
        return replace(self.add_round(other), seconds=max(self.seconds, other.seconds))

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


@dataclass(slots=True)
class ScoredRollout:
    """A rollout, the sample that rewards see of it, and its scores so far, by reward."""

    rollout: Rollout
    sample: Sample
    scores: dict[str, Score] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The rewards of a run by name, and how many of a step's samples may fail."""

    rewards: dict[str, BaseReward]
    max_errors: float
    """The share of samples that may fail."""
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the rewards that score a task's samples; a task that is not listed uses all rewards."""

    def score(
        self,
        rollouts: Sequence[Rollout],
        max_tokens: int,
        enter: Callable[[str], None] = lambda stage: None,
        progress: Progress = unreported,
        known: Iterable[str] = (),
    ) -> tuple[list[Rollout], ScoreStats]:
        """The rollouts with their rewards, NaN where one does not apply or failed, and counts of errors.

        max_tokens: length limit of sampling. enter: called with the name of each reward before its call.
        progress: called with the number of samples scored. known: rewards whose scores the rollouts have already, for
        rewards that see the group.
        """
        scored = [
            ScoredRollout(one, Sample.of(one, max_tokens), {name: one.rewards[name] for name in known})
            for one in rollouts
        ]
        return self.add_missing_scores(scored, enter, progress)

    def add_missing_scores(
        self,
        rollouts: Sequence[ScoredRollout],
        enter: Callable[[str], None] = lambda stage: None,
        progress: Progress = unreported,
    ) -> tuple[list[Rollout], ScoreStats]:
        """Like `score`, for rollouts that may already have some of their scores."""
        start = time.perf_counter()
        for name in sorted(self.rewards, key=self.sees_group):  # the others first, each kind in the config's order
            enter(f"reward.{name}")
            self.add_scores(name, rollouts, progress)
            failed = [(one.sample, score) for one in rollouts if isinstance(score := one.scores[name], Failure)]
            for sample, failure in failed[:3]:
                logger.warning("reward.%s could not score %s: %s", name, excerpt(sample.text), failure.reason)
        numbers = [{name: _number(one.scores[name]) for name in self.rewards} for one in rollouts]
        found = [replace(one.rollout, rewards=rewards) for one, rewards in zip(rollouts, numbers, strict=True)]
        return found, self._stats(rollouts, time.perf_counter() - start)

    def add_scores(self, name: str, rollouts: Iterable[ScoredRollout], progress: Progress = unreported) -> None:
        """Add the score of one reward to each rollout that lacks it.

        The reward sees only samples of its tasks, and none whose episode failed. One that sees the group needs the
        scores of the others.
        """
        missing = []
        for one in rollouts:
            if name in one.scores:
                continue
            if name not in self.rewards_for(one.sample.task):
                one.scores[name] = None
            elif one.sample.episode and one.sample.episode.problem:
                one.scores[name] = Failure(one.sample.episode.problem)
            else:
                missing.append(one)
        reward, begin = self.rewards[name], 0
        for batch in _batches(reward, missing):
            progress(begin, len(missing), f"scores of reward.{name}")
            begin += len(batch)
            samples = [self._with_scores(one) if reward.sees_group else one.sample for one in batch]
            for one, score in zip(batch, call(reward, samples), strict=True):
                one.scores[name] = score

    def sees_group(self, name: str) -> bool:
        return name in self.rewards and self.rewards[name].sees_group

    def rewards_for(self, task: str) -> Collection[str]:
        """The names of the rewards that score a task's samples."""
        return self.tasks.get(task, self.rewards)

    def _with_scores(self, one: ScoredRollout) -> Sample:
        """The sample with the scores of the rewards that do not see the group."""
        names = self.tasks.get(one.sample.task, one.scores)
        numbers = {n: _number(one.scores[n]) for n in names if n in one.scores and not self.sees_group(n)}
        return replace(one.sample, scores={n: None if math.isnan(number) else number for n, number in numbers.items()})

    def _stats(self, rollouts: Sequence[ScoredRollout], seconds: float) -> ScoreStats:
        by_task: dict[str, list[ScoredRollout]] = {}
        for one in rollouts:
            by_task.setdefault(one.sample.task, []).append(one)
        samples = Counter({task: len(own) for task, own in by_task.items()})
        counts = {(name, task): self._counts(name, task, own) for name in self.rewards for task, own in by_task.items()}
        return ScoreStats(samples, seconds, counts)

    def _counts(self, name: str, task: str, rollouts: Sequence[ScoredRollout]) -> RewardStats:
        """The counts of one reward over the rollouts of one task."""
        scores = [(one.sample, one.scores[name]) for one in rollouts]
        failed = [_sentence(sample, score.reason) for sample, score in scores if isinstance(score, Failure)]
        late = [_sentence(sample, score.reason) for sample, score in scores if isinstance(score, Forfeit)]
        return RewardStats(
            errors=len(failed),
            unreachable=sum(isinstance(score, Unreachable) for _, score in scores),
            timeouts=len(late),
            silent=sum(score is None for _, score in scores) if name in self.rewards_for(task) else 0,
            first_error=failed[0] if failed else "",
            first_timeout=late[0] if late else "",
        )

    def check_errors(self, stats: ScoreStats, expected: int = 0) -> None:
        """Raise RewardError if too many samples of a reward failed; RewardGone if the cause is an unavailable service.

        expected: number of samples of the whole step, to check a step that is not complete yet.
        """
        total = stats.samples.total()
        allowed = self.max_errors * max(total, expected)
        for name, reward in self.rewards.items():
            found = stats.of_tasks(name, stats.samples)
            if found.errors > allowed:
                kind = RewardError if found.errors - found.unreachable > allowed else RewardGone
                limit = f"more than rollout.max_reward_errors={self.max_errors:g} allows"
                count = f"could not score {found.errors} of {total} samples"
                raise kind(f"reward.{name} ({reward.label}) {count}, {limit}: {found.first_error}")

    def metrics(self, stats: ScoreStats, names: Collection[str]) -> dict[str, float]:
        """The time of scoring, and the errors of these rewards; timeouts too, if the reward limits a sample's time."""
        found = {"time/reward": stats.seconds}
        for name, reward in self.rewards.items():
            if name not in names:
                continue
            counts = stats.of_tasks(name, stats.samples)
            found[f"rewards/{name}/errors"] = float(counts.errors)
            if reward.scores_independently:
                found[f"rewards/{name}/timeouts"] = float(counts.timeouts)
        return found

    def warnings(self, stats: ScoreStats) -> dict[str, str]:
        """Warnings as sentences; a repeated cause has the same key.

        They are about a reward that scores nothing, and samples that are wrong because scoring them took too long.
        """
        found = {}
        for name, reward in self.rewards.items():
            subject = f"reward.{name} ({reward.label})"
            tasks = [task for task in stats.samples if name in self.rewards_for(task)]
            silent = stats.of_tasks(name, tasks).silent
            if silent and silent == stats.n_samples(tasks):
                samples = f"all {silent} samples of task {', '.join(tasks)}"
                found[f"silent {name}"] = f"{subject} returned None for {samples}: it does not affect their score"
            for task, count in stats.samples.items():
                if (one := stats.of(name, task)).timeouts:
                    samples = f"{one.timeouts} of {count} samples" + (f" of task {task}" if task else "")
                    reason = f"as wrong because scoring them took too long: {one.first_timeout}"
                    found[f"timeouts {name} {task}"] = f"{subject} scored {samples} {reason}"
        return found

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()


class StreamingScorer:
    """Scores the groups of a round of sampling as they arrive; a context manager around the sampling.

    Rewards with worker processes score in one thread, each time all groups that have arrived meanwhile. `finish`, after
    the block, scores the rest. Leaving the block waits for the thread, but not after an error.

    rollouts_of(k, completions): the rollouts of the k-th request. lock: held while a reward is called.
    """

    def __init__(
        self,
        scorer: Scorer,
        max_tokens: int,
        rollouts_of: Callable[[int, Sequence[Completion]], list[Rollout]],
        lock: threading.Lock,
    ) -> None:
        self.scorer, self.max_tokens, self.rollouts_of, self.lock = scorer, max_tokens, rollouts_of, lock
        self._thread = ThreadPoolExecutor(1, "rewards")
        self._calls: list[Future[None]] = []
        self._arrived: deque[tuple[int, Sequence[Completion]]] = deque()
        self._groups: dict[int, list[ScoredRollout]] = {}
        self._failed = False

    def add(self, k: int, completions: Sequence[Completion]) -> None:
        """Start to score all completions of the k-th request. Returns at once."""
        self._arrived.append((k, completions))
        self._calls.append(self._thread.submit(self._score_arrived))

    def _score_arrived(self) -> None:
        """Score the groups that have arrived; none if the call before has taken them."""
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        groups = {k: self._group(k, completions) for k, completions in arrived}
        rollouts = [one for group in groups.values() for one in group]
        with self.lock:
            if self._failed:  # the rewards are being closed
                return
            for name, reward in self.scorer.rewards.items():
                if reward.scores_independently and not reward.sees_group:
                    self.scorer.add_scores(name, rollouts)
        self._groups |= groups

    def _group(self, k: int, completions: Sequence[Completion]) -> list[ScoredRollout]:
        return [ScoredRollout(one, Sample.of(one, self.max_tokens)) for one in self.rollouts_of(k, completions)]

    def finish(
        self, sampled: Sequence[Sequence[Completion]], enter: Callable[[str], None], progress: Progress
    ) -> tuple[list[Rollout], ScoreStats]:
        """The rollouts of all requests with their rewards, in order, and counts of errors: see `Scorer.score`."""
        groups = [self._groups.get(k) or self._group(k, completions) for k, completions in enumerate(sampled)]
        with self.lock:
            return self.scorer.add_missing_scores([one for group in groups for one in group], enter, progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self._thread.shutdown(wait=kind is None, cancel_futures=kind is not None)
        if kind is None:
            for done in self._calls:
                done.result()  # raises the call's error


def call(reward: BaseReward, samples: Sequence[Sample]) -> list[Score]:
    """The scores of one call of a reward; Failures if it raises, or returns something else than numbers and None."""
    from grpocli.rewards.worker_pool import PoolClosed

    if not samples:
        return []
    try:
        with nullcontext() if reward.scores_independently else keep_random_state(seed_for(samples)):
            return [as_score(score) for score in reward(samples)]
    except PoolClosed:
        raise
    except (Exception, SystemExit) as error:
        logger.exception("%s raised", reward.label)
        return [Failure(f"it raised {raised(error)}")] * len(samples)


def _batches(reward: BaseReward, rollouts: Sequence[ScoredRollout]) -> Iterator[Sequence[ScoredRollout]]:
    """The samples of each call of a reward. Samples of one prompt stand next to each other."""
    if reward.sees_group:
        yield from (list(group) for _, group in groupby(rollouts, key=lambda one: one.rollout.prompt.uid))
        return
    size = BATCH if reward.scores_independently else max(1, len(rollouts))
    for begin in range(0, len(rollouts), size):
        yield rollouts[begin : begin + size]


def _number(score: Score) -> float:
    """The score as a number; NaN where a reward does not apply or failed."""
    return math.nan if score is None or isinstance(score, Failure) else float(score)


def _sentence(sample: Sample, reason: str) -> str:
    task = f" (task {sample.task})" if sample.task else ""
    first = f"the first was the completion {excerpt(sample.text)} of {excerpt(str(sample.prompt))}{task}"
    return f"{reason}; {first}"


def excerpt(text: str, length: int = 80) -> str:
    """The beginning of a text, on one line."""
    return repr(shorten(text, length))
