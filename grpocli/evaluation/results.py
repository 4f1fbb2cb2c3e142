"""From the groups of an evaluation to its numbers, per task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from grpocli.evaluation.estimators import interval, majority, pass_at_k
from grpocli.rewards.reward import BaseReward
from grpocli.rewards.scoring import sample_of
from grpocli.types import Group, Rollout


@dataclass(frozen=True, slots=True)
class Estimate:
    """low, high: its 95 % confidence interval over questions, by `interval`."""

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
    """questions: with a scored sample; failed: samples that the reward could not score, which are left out.

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


@dataclass(frozen=True, slots=True)
class AccuracyRewards:
    """The reward that says what is right: names, by task, and the rewards, by name."""

    names: Mapping[str, str]
    rewards: Mapping[str, BaseReward]

    def name(self, group: Group) -> str:
        return self.names[group.prompt.task]

    def right(self, group: Group) -> list[float]:
        """1 or 0 for each rollout; NaN where it was not scored."""
        scores = (rollout.rewards[self.name(group)] for rollout in group.rollouts)
        return [math.nan if math.isnan(score) else float(score >= 1) for score in scores]

    def majority(self, group: Group, max_tokens: int) -> float:
        name = self.name(group)
        known: list[Rollout] = [rollout for rollout in group.rollouts if not math.isnan(rollout.rewards[name])]
        votes = self.rewards[name].votes([sample_of(rollout, max_tokens) for rollout in known])
        return majority(votes, [rollout.rewards[name] >= 1 for rollout in known])


def task_result(
    task: str, accuracy_rewards: AccuracyRewards, greedy: Sequence[Group], sampled: Sequence[Group], max_tokens: int
) -> TaskResult:
    """Of one task's problems, or of several tasks' together."""
    rollouts = [rollout for group in [*greedy, *sampled] for rollout in group.rollouts]
    done = [rollout.completion for rollout in rollouts]
    scores: dict[str, Estimate] = {}
    if greedy:
        scores["greedy"] = Estimate.of(
            [mean for group in greedy if not math.isnan(mean := _mean(accuracy_rewards.right(group)))]
        )
    if sampled:
        scores |= _of_samples(sampled, accuracy_rewards, max_tokens)
    return TaskResult(
        task=task,
        questions=len({g.uid for g in [*greedy, *sampled] if _scored(accuracy_rewards.right(g))}),
        failed=sum(math.isnan(right) for group in [*greedy, *sampled] for right in accuracy_rewards.right(group)),
        mean_length=float(np.mean([completion.written for completion in done])),
        truncated=float(np.mean([completion.truncated for completion in done])),
        scores=scores,
    )


def _of_samples(groups: Sequence[Group], accuracy_rewards: AccuracyRewards, max_tokens: int) -> Mapping[str, Estimate]:
    samples = len(groups[0].rollouts)
    scored = [(group, accuracy_rewards.right(group)) for group in groups]
    scored = [(group, right) for group, right in scored if _scored(right)]
    found = {f"mean@{samples}": Estimate.of([_mean(right) for _, right in scored])}
    k = 1
    while (k := min(2 * k, samples)) > 1:
        counts = [(int(np.nansum(right)), len(_scored(right))) for _, right in scored]
        found[f"pass@{k}"] = Estimate.of([pass_at_k(c, n, k) for c, n in counts if n >= k])
        if k == samples:
            break
    if samples > 1:
        found[f"maj@{samples}"] = Estimate.of([accuracy_rewards.majority(group, max_tokens) for group, _ in scored])
    return found


def _scored(right: Sequence[float]) -> list[float]:
    return [one for one in right if not math.isnan(one)]


def _mean(right: Sequence[float]) -> float:
    scored = _scored(right)
    return float(np.mean(scored)) if scored else math.nan


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
