"""Scoring rollouts with all rewards of a run; what could not be scored is counted, never taken for a 0."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any, TypeVar

from grpocli.errors import RewardError, RewardGone
from grpocli.progress import Progress, unreported
from grpocli.rewards.reward import BaseReward, Failure, Forfeit, Sample, Score, Unreachable, as_score
from grpocli.types import Rollout, Text
from grpocli.user_frames import raised

logger = logging.getLogger(__name__)

K = TypeVar("K")
Pair = tuple[str, str]  # a reward and a task, by their names

PIECE = 256
"""Samples that a reward with processes of its own is given at once, so that progress can be told."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The share of samples that may fail, and the config key that says so."""

    key: str
    share: float

    def __str__(self) -> str:
        return f"{self.key}={self.share:g}"


@dataclass(frozen=True, slots=True)
class Tally:
    """samples: of each task. bare: those of them to which no reward applies.

    errors: how many could not be scored; first: the first of these as a sentence; unreachable: how many of them because
    a service was unavailable. silent: for how many a reward that is one of their task's gave None. timeouts: how many
    were wrong because scoring them took too long; late: the first of these as a sentence.
    """

    samples: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    errors: Counter[Pair] = field(default_factory=Counter)
    first: dict[Pair, str] = field(default_factory=dict)
    silent: Counter[Pair] = field(default_factory=Counter)
    bare: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[Pair] = field(default_factory=Counter)
    late: dict[Pair, str] = field(default_factory=dict)
    unreachable: Counter[Pair] = field(default_factory=Counter)

    def then(self, later: Tally) -> Tally:
        """Both, one after the other."""
        return self._with(later, self.seconds + later.seconds)

    def beside(self, other: Tally) -> Tally:
        """Both, at the same time in two processes."""
        return self._with(other, max(self.seconds, other.seconds))

    def _with(self, other: Tally, seconds: float) -> Tally:
        return Tally(
            _sum(self.samples, other.samples),
            seconds,
            _sum(self.errors, other.errors),
            other.first | self.first,
            _sum(self.silent, other.silent),
            _sum(self.bare, other.bare),
            _sum(self.timeouts, other.timeouts),
            other.late | self.late,
            _sum(self.unreachable, other.unreachable),
        )

    def errors_of(self, task: str) -> int:
        """How many scores of a task's samples are missing."""
        return sum(failed for (_, where), failed in self.errors.items() if where == task)

    @property
    def metrics(self) -> dict[str, float]:
        found = {"time/reward": self.seconds}
        for what, counted in (("errors", self.errors), ("timeouts", self.timeouts)):
            for (reward, _), number in counted.items():
                name = f"rewards/{reward}/{what}"
                found[name] = found.get(name, 0.0) + number
        return found


def _sum(one: Counter[K], other: Counter[K]) -> Counter[K]:
    """With what is 0 in both, which `+` leaves out."""
    both = Counter(one)
    both.update(other)
    return both


@dataclass(frozen=True, slots=True)
class Scorer:
    """The rewards by name. A run stops when a larger share than `max_errors` of a step's samples fails.

    tasks: which rewards score a task's samples, by its name; all of them those of a task that is not in it.
    limits: of tasks that have their own limit, the share that may fail, and the key that says so.
    """

    rewards: dict[str, BaseReward]
    max_errors: float
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def early(self, rollouts: Sequence[Rollout], max_tokens: int) -> list[dict[str, Score]]:
        """Of some of a step's rollouts, the scores that need not wait for the others: of rewards with processes of
        their own."""
        samples = [sample_of(rollout, max_tokens) for rollout in rollouts]
        scores = {name: self._of(name, samples) for name, reward in self.rewards.items() if reward.has_processes}
        return [{name: found[i] for name, found in scores.items()} for i in range(len(samples))]

    def score(
        self,
        rollouts: Sequence[Rollout],
        max_tokens: int,
        known: Sequence[Mapping[str, Score]] | None = None,
        enter: Callable[[str], None] = lambda stage: None,
        progress: Progress = unreported,
    ) -> tuple[list[dict[str, float]], Tally]:
        """Rewards by name for each rollout (NaN: does not apply, or failed), and what it took.

        max_tokens: the limit that the completions were sampled under. known: what each has of `early`. enter: is told
        which reward is being called. progress: called with the number of samples that it has scored.
        """
        start = time.perf_counter()
        samples = [sample_of(rollout, max_tokens) for rollout in rollouts]
        known = known or [{} for _ in samples]
        results: list[dict[str, float]] = [{} for _ in samples]
        scores: dict[str, list[Score]] = {}
        for name in self.rewards:
            enter(f"reward.{name}")
            scores[name] = self._all_of(name, samples, known, progress)
        for name, found in scores.items():
            for result, score in zip(results, found, strict=True):
                result[name] = math.nan if score is None or isinstance(score, Failure) else float(score)
        return results, self._tally(samples, scores, time.perf_counter() - start)

    def _all_of(
        self, name: str, samples: Sequence[Sample], known: Sequence[Mapping[str, Score]], progress: Progress
    ) -> list[Score]:
        others = iter(self._of(name, [s for s, k in zip(samples, known, strict=True) if name not in k], progress))
        scores = [k[name] if name in k else next(others) for k in known]
        failed = [(s, f) for s, f in zip(samples, scores, strict=True) if isinstance(f, Failure)]
        for sample, failure in failed[:3]:
            logger.warning("reward.%s could not score %s: %s", name, excerpt(sample.text), failure.reason)
        return scores

    def _tally(self, samples: Sequence[Sample], scores: Mapping[str, list[Score]], seconds: float) -> Tally:
        tally = Tally(Counter(sample.task for sample in samples), seconds)
        tally.errors.update({(name, task): 0 for name in scores for task in tally.samples})
        tally.timeouts.update({pair: 0 for pair in tally.errors if self.rewards[pair[0]].has_processes})
        for i, sample in enumerate(samples):
            given = {name: found[i] for name, found in scores.items()}
            tally.bare[sample.task] += all(score is None for score in given.values())
            for name, score in given.items():
                pair = name, sample.task
                tally.silent[pair] += score is None and name in self.rewards_for(sample.task)
                if isinstance(score, Failure):
                    tally.errors[pair] += 1
                    tally.unreachable[pair] += isinstance(score, Unreachable)
                    tally.first.setdefault(pair, _sentence(sample, score.reason))
                if isinstance(score, Forfeit):
                    tally.timeouts[pair] += 1
                    tally.late.setdefault(pair, _sentence(sample, score.reason))
        return tally

    def check_errors(self, tally: Tally, expected: int = 0) -> None:
        """Raise RewardError, naming the reward and a sample, where too many could not be scored; RewardGone where
        a scoring service was unavailable.

        expected: how many samples a whole step has, for a check before all of them are there.
        """
        check_errors(self, tally, expected)

    def remarks(self, tally: Tally) -> dict[str, str]:
        """Why a step teaches less than somebody might think: a sentence each; the same reason has the same key."""
        return remarks(self, tally)

    def rewards_for(self, task: str) -> Collection[str]:
        """The names of those that score a task's samples."""
        return self.tasks.get(task, self.rewards)

    def _of(self, name: str, samples: Sequence[Sample], progress: Progress = unreported) -> list[Score]:
        """Scores by one reward, which is shown only what it is for, and no episode that broke off."""
        given = [self._before(name, sample) for sample in samples]
        asked = [s for s, g in zip(samples, given, strict=True) if g is ...]
        scores = iter(self._in_pieces(name, asked, progress))
        return [next(scores) if score is ... else score for score in given]

    def _in_pieces(self, name: str, samples: Sequence[Sample], progress: Progress) -> list[Score]:
        """A reward that has processes scores each sample by itself; another one may want to see all of them."""
        reward, scores = self.rewards[name], list[Score]()
        step = PIECE if reward.has_processes else max(1, len(samples))
        for begin in range(0, len(samples), step):
            progress(begin, len(samples), f"scores of reward.{name}")
            scores += call(reward, samples[begin : begin + step])
        return scores

    def _before(self, name: str, sample: Sample) -> Score | EllipsisType:
        """What is known without asking the reward; ... where that has to be done."""
        if name not in self.rewards_for(sample.task):
            return None
        if sample.episode and sample.episode.problem:
            return Failure(sample.episode.problem)
        return ...

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()


def call(reward: BaseReward, samples: Sequence[Sample]) -> list[Score]:
    """Scores that are numbers, None, or failures; whatever a reward raises or returns."""
    from grpocli.rewards.isolate_state import Damage, undisturbed
    from grpocli.rewards.pool import PoolClosed

    if not samples:
        return []
    try:
        if reward.has_processes:
            return [as_score(score) for score in reward(samples)]
        own = [independent(sample) for sample in samples]
        with undisturbed(reward.label, samples):
            return [as_score(score) for score in reward(own)]
    except (Damage, PoolClosed):
        raise
    except (Exception, SystemExit) as error:
        logger.exception("%s raised", reward.label)
        return [Failure(f"it raised {raised(error)}")] * len(samples)


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


def independent(sample: Sample) -> Sample:
    """A copy that a reward may change: the record, and the rewards after it, have the original."""
    return replace(
        sample,
        prompt=_copied(sample.prompt),
        completion=_copied(sample.completion),
        columns=_copied(sample.columns),
        token_ids=list(sample.token_ids),
    )


def _copied(value: Any) -> Any:
    """Lists and dicts anew; what is in them besides stays the same."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def excerpt(text: str, length: int = 80) -> str:
    """The beginning of a text, on one line."""
    return repr(text if len(text) <= length else text[:length] + "...")


def _sentence(sample: Sample, reason: str) -> str:
    task = f" (task {sample.task})" if sample.task else ""
    first = f"the first was the completion {excerpt(sample.text)} of {excerpt(str(sample.prompt))}{task}"
    return f"{reason}; {first}"


def check_errors(scorer: Scorer, tally: Tally, expected: int) -> None:
    """See `Scorer.check_errors`. Tasks with their own limit one by one, the others together."""
    others = [task for task in tally.samples if task not in scorer.limits]
    together = [([task], scorer.limits[task]) for task in tally.samples if task in scorer.limits]
    for tasks, limit in [*together, (others, Limit("rollout.max_reward_errors", scorer.max_errors))]:
        samples = _total(tally, tasks)
        allowed = limit.share * samples * max(1.0, expected / max(tally.samples.total(), 1))
        for name in scorer.rewards:
            errors = sum(tally.errors[name, task] for task in tasks)
            if errors > allowed:
                lasting = errors - sum(tally.unreachable[name, task] for task in tasks)
                kind = RewardError if lasting > allowed else RewardGone
                raise kind(_failed(scorer, tally, name, tasks, f", more than {limit} allows"))


def remarks(scorer: Scorer, tally: Tally) -> dict[str, str]:
    """See `Scorer.remarks`."""
    return _bare(tally) | _silent(scorer, tally) | _tolerated(scorer, tally) | _late(scorer, tally)


def _bare(tally: Tally) -> dict[str, str]:
    samples = tally.samples
    return {
        f"bare {task}": f"no reward applies to {bare} of {samples[task]} samples of task {task}: they teach nothing"
        for task, bare in tally.bare.items()
        if bare
    }


def _silent(scorer: Scorer, tally: Tally) -> dict[str, str]:
    """Of rewards beside others: where none applies at all, that has been said."""
    found = {}
    for name, reward in scorer.rewards.items():
        tasks = [task for task in tally.samples if name in scorer.rewards_for(task)]
        silent = sum(tally.silent[name, task] for task in tasks)
        if silent == _total(tally, tasks) > sum(tally.bare[task] for task in tasks):
            found[f"silent {name}"] = (
                f"reward.{name} ({reward.label}) gave None for all {silent} samples of task {', '.join(tasks)}: "
                "it has no part in their score"
            )
    return found


def _tolerated(scorer: Scorer, tally: Tally) -> dict[str, str]:
    """What would have ended the run without a task's own limit."""
    return {
        f"errors {name} {task}": _failed(scorer, tally, name, [task], f" of task {task}, which {limit} allows")
        for task, limit in scorer.limits.items()
        for name in scorer.rewards
        if tally.errors[name, task] > scorer.max_errors * tally.samples[task]
    }


def _late(scorer: Scorer, tally: Tally) -> dict[str, str]:
    found = {}
    for (name, task), late in tally.timeouts.items():
        if late:
            samples = f"{late} of {tally.samples[task]} samples" + (f" of task {task}" if task else "")
            found[f"timeouts {name} {task}"] = (
                f"reward.{name} ({scorer.rewards[name].label}) scored {samples} as wrong because scoring them took too "
                f"long: {tally.late[name, task]}"
            )
    return found


def _failed(scorer: Scorer, tally: Tally, name: str, tasks: Collection[str], allowed: str) -> str:
    failed = sum(tally.errors[name, task] for task in tasks)
    first = next(tally.first[name, task] for task in tasks if (name, task) in tally.first)
    label = scorer.rewards[name].label
    return f"reward.{name} ({label}) could not score {failed} of {_total(tally, tasks)} samples{allowed}: {first}"


def _total(tally: Tally, tasks: Collection[str]) -> int:
    return sum(tally.samples[task] for task in tasks)
