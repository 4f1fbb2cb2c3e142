"""From the groups of an evaluation to its numbers, per task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from grpocli.data import Group, Rollout
from grpocli.evaluation.estimators import interval, majority, pass_at_k
from grpocli.rewards.reward import BaseReward
from grpocli.rewards.scoring import sample_of


@dataclass(frozen=True, slots=True)
class Estimate:
    """low, high: its 95 % confidence interval over questions."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean of a value for each question; nothing of none."""
        if not values:
            return cls(math.nan, math.nan, math.nan)
        return cls(float(np.mean(values)), *interval(values))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """questions: with a judged sample; failed: samples that the reward could not judge, which are left out.

    scores: `greedy`, `mean@N`, `pass@K`, `maj@N`. mean_length: tokens the model wrote. truncated: share of samples cut
    off.
    """

    task: str
    questions: int
    failed: int
    mean_length: float
    truncated: float
    scores: dict[str, Estimate] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, where what is not known is null."""
        found: dict[str, Any] = _without_nan(asdict(self))
        return found


def task_result(
    task: str, judge: str, reward: BaseReward, greedy: Sequence[Group], sampled: Sequence[Group], max_tokens: int
) -> TaskResult:
    """judge: the name of the reward that says what is right."""
    rollouts = [rollout for group in [*greedy, *sampled] for rollout in group.rollouts]
    done = [rollout.completion for rollout in rollouts]
    scores: dict[str, Estimate] = {}
    if greedy:
        scores["greedy"] = Estimate.of(
            [mean for group in greedy if not math.isnan(mean := _mean(_right(group, judge)))]
        )
    if sampled:
        scores |= _of_samples(sampled, judge, reward, max_tokens)
    return TaskResult(
        task=task,
        questions=len({g.uid for g in [*greedy, *sampled] if _judged(_right(g, judge))}),
        failed=sum(math.isnan(rollout.rewards[judge]) for rollout in rollouts),
        mean_length=float(np.mean([completion.written for completion in done])),
        truncated=float(np.mean([completion.truncated for completion in done])),
        scores=scores,
    )


def _of_samples(groups: Sequence[Group], judge: str, reward: BaseReward, max_tokens: int) -> Mapping[str, Estimate]:
    samples = len(groups[0].rollouts)
    judged = [(group, _right(group, judge)) for group in groups]
    judged = [(group, right) for group, right in judged if _judged(right)]
    found = {f"mean@{samples}": Estimate.of([_mean(right) for _, right in judged])}
    k = 1
    while (k := min(2 * k, samples)) > 1:
        counts = [(int(np.nansum(right)), len(_judged(right))) for _, right in judged]
        found[f"pass@{k}"] = Estimate.of([pass_at_k(c, n, k) for c, n in counts if n >= k])
        if k == samples:
            break
    if samples > 1:
        found[f"maj@{samples}"] = Estimate.of([_majority(group, judge, reward, max_tokens) for group, _ in judged])
    return found


def _majority(group: Group, judge: str, reward: BaseReward, max_tokens: int) -> float:
    known: list[Rollout] = [rollout for rollout in group.rollouts if not math.isnan(rollout.rewards[judge])]
    votes = [reward.vote(sample_of(rollout, max_tokens)) for rollout in known]
    return majority(votes, [rollout.rewards[judge] >= 1 for rollout in known])


def _right(group: Group, judge: str) -> list[float]:
    """1 or 0 for each rollout; NaN where it was not judged."""
    scores = (rollout.rewards[judge] for rollout in group.rollouts)
    return [math.nan if math.isnan(score) else float(score >= 1) for score in scores]


def _judged(right: Sequence[float]) -> list[float]:
    return [one for one in right if not math.isnan(one)]


def _mean(right: Sequence[float]) -> float:
    judged = _judged(right)
    return float(np.mean(judged)) if judged else math.nan


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
