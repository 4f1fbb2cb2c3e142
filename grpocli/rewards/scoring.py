"""Scoring rollouts with all rewards of a run; what could not be scored is counted, never taken for a 0."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any

from grpocli.progress import Progress, unreported
from grpocli.rewards import error_limits as verdict
from grpocli.rewards.reward import BaseReward, Failure, Forfeit, Sample, Score, Unreachable, as_score
from grpocli.rewards.score_stats import Tally
from grpocli.types import Rollout, Text
from grpocli.user_frames import raised

logger = logging.getLogger(__name__)

PIECE = 256
"""Samples that a reward with processes of its own is given at once, so that progress can be told."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """The rewards by name. A run stops when a larger share than `max_errors` of a step's samples fails.

    tasks: which rewards score a task's samples, by its name; all of them those of a task that is not in it.
    limits: of tasks that have their own limit, the share that may fail, and the key that says so.
    """

    rewards: dict[str, BaseReward]
    max_errors: float
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    limits: Mapping[str, verdict.Limit] = field(default_factory=dict)

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
        verdict.check_errors(self, tally, expected)

    def remarks(self, tally: Tally) -> dict[str, str]:
        """Why a step teaches less than somebody might think: a sentence each; the same reason has the same key."""
        return verdict.remarks(self, tally)

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
