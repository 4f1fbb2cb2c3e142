"""Scoring rollouts with all rewards of a run; what could not be scored is counted, never taken for a 0."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from grpocli.data import Rollout, Text
from grpocli.errors import RewardError
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The rewards by name. The run stops when a larger share than `max_errors` of a call's samples fails."""

    rewards: dict[str, BaseReward]
    max_errors: float

    def score(self, rollouts: Sequence[Rollout], max_tokens: int) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Rewards by name for each rollout (NaN: does not apply, or failed), and counts that add up over calls.

        max_tokens: the limit that the completions were sampled under.
        Raises RewardError, naming the reward and a sample, where too many could not be scored.
        """
        samples = [sample_of(rollout, max_tokens) for rollout in rollouts]
        results: list[dict[str, float]] = [{} for _ in samples]
        counts: dict[str, float] = {"time/reward": 0.0}
        for name, reward in self.rewards.items():
            start = time.perf_counter()
            scores = self._call(reward, samples)
            failed = [(s, f) for s, f in zip(samples, scores, strict=True) if isinstance(f, Failure)]
            self._judge(name, reward, failed, len(samples))
            for result, score in zip(results, scores, strict=True):
                result[name] = math.nan if score is None or isinstance(score, Failure) else score
            counts[f"rewards/{name}/errors"] = float(len(failed))
            counts["time/reward"] += time.perf_counter() - start
        return results, counts

    def _call(self, reward: BaseReward, samples: Sequence[Sample]) -> list[Score]:
        if not samples:
            return []
        try:
            return [_number(score) for score in reward(samples)]
        except (Exception, SystemExit) as error:
            logger.exception("%s raised", reward.label)
            return [Failure(f"it raised {type(error).__name__}: {error}")] * len(samples)

    def _judge(self, name: str, reward: BaseReward, failed: list[tuple[Sample, Failure]], total: int) -> None:
        for sample, failure in failed[:3]:
            logger.warning("reward.%s could not score %s: %s", name, excerpt(sample.text), failure.reason)
        if len(failed) > self.max_errors * total:
            sample, failure = failed[0]
            raise RewardError(
                f"reward.{name} ({reward.label}) could not score {len(failed)} of {total} samples, more than "
                f"rollout.max_reward_errors={self.max_errors} allows: {failure.reason}; "
                f"the first was the completion {excerpt(sample.text)} of {excerpt(str(sample.prompt))}"
            )

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()


def sample_of(rollout: Rollout, max_tokens: int) -> Sample:
    """A rollout as rewards see it."""
    chat = not isinstance(rollout.prompt.text, str)
    completion: Text = [{"role": "assistant", "content": rollout.text}] if chat else rollout.text
    done = rollout.completion
    return Sample(
        prompt=rollout.prompt.text,
        completion=completion,
        text=rollout.text,
        columns=rollout.prompt.columns,
        token_ids=done.token_ids,
        max_tokens=max_tokens,
        truncated=done.truncated,
    )


def excerpt(text: str, length: int = 80) -> str:
    """The beginning of a text, on one line."""
    return repr(text if len(text) <= length else text[:length] + "...")


def _number(score: Score) -> Score:
    if score is None or isinstance(score, Failure):
        return score
    if not hasattr(score, "__float__"):
        return Failure(f"it returned {score!r}, which is no number")
    try:
        value = float(score)
    except (TypeError, ValueError, OverflowError) as error:
        return Failure(f"it returned what is no number: {error}")
    return value if math.isfinite(value) else Failure(f"it returned {value}")
