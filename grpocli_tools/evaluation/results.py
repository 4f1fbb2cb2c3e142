"""The result of a task: its scores with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from grpocli.training.accuracy import AccuracyRewards, mean_or_nan, question_scores
from grpocli.types import Group

AGREEING = 2
"""Pseudo-questions of `interval`: two keep its coverage above 90 % for ten questions and sixteen samples."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean over questions, given one value between 0 and 1 for each question.

    Wilson's score interval (1927). A value of 0 or 1 counts as one draw; a mean over several samples counts as more, by
    the design effect: the variance of 0/1 outcomes divided by that of the values (Kish, Survey Sampling, 1965). The
    latter is estimated with `AGREEING` additional questions whose samples all agree, because few questions give a poor
    estimate. Raises ValueError without values.
    """
    n = len(values)
    if not n:
        raise ValueError("a confidence interval needs a value")
    mean = min(max(float(np.mean(values)), 0.0), 1.0)
    of_outcomes = mean * (1 - mean)
    apart = float(np.square(np.asarray(values) - mean).sum()) + AGREEING * of_outcomes
    draws = n * max(1.0, of_outcomes * (n - 1 + AGREEING) / apart) if apart > 0 else n
    z = NormalDist().inv_cdf(0.975)
    center, reach = mean + z**2 / (2 * draws), z * math.sqrt(of_outcomes / draws + (z / (2 * draws)) ** 2)
    low, high = ((center + side * reach) / (1 + z**2 / draws) for side in (-1, 1))
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions; low, high: its 95 % confidence interval (`interval`)."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The estimate from one value for each question; NaN without questions."""
        low, high = interval(values) if values else (math.nan, math.nan)
        return cls(mean_or_nan(values), low, high)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The accuracy of one task, or of several together.

    questions: those with a scored sample. failed: samples that the reward could not score, which are left out. scores:
    `greedy`, `mean@N`, `pass@K`, `maj@N`. mean_length: tokens that the model wrote. truncated: the share of samples
    that were cut off. by_problem: the share of right samples of each question (`problem_id`), greedy ones only if there
    are no others.
    """

    task: str
    questions: int
    failed: int
    mean_length: float
    truncated: float
    scores: dict[str, Estimate] = field(default_factory=dict)
    by_problem: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The result in JSON types; unknown numbers are null."""
        values: dict[str, Any] = _without_nan(asdict(self))
        return values


def task_result(
    task: str, accuracy_rewards: AccuracyRewards, greedy: Sequence[Group], sampled: Sequence[Group], max_tokens: int
) -> TaskResult:
    """The result of one task's groups. greedy: groups of one completion each."""
    groups = [*greedy, *sampled]
    done = [rollout.completion for group in groups for rollout in group.rollouts]
    failed = [[math.isnan(one) for one in accuracy_rewards.right(group)] for group in groups]
    scores = question_scores(accuracy_rewards, greedy, sampled, max_tokens)
    return TaskResult(
        task=task,
        questions=len({group.uid for group, none in zip(groups, failed, strict=True) if not all(none)}),
        failed=sum(map(sum, failed)),
        mean_length=float(np.mean([completion.written for completion in done])),
        truncated=float(np.mean([completion.truncated for completion in done])),
        scores={name: Estimate.of(values) for name, values in scores.items()},
        by_problem=accuracy_rewards.by_problem(sampled or greedy),
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
