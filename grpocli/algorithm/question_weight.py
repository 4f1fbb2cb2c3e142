"""Weights of questions. scores_PG: the summed rewards. accuracy_PG: the reward that a weight names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpocli.algorithm.statistics import constant_P1, count_P1, mean_P1
from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run


@part("algorithm/question_weight", "uniform")
class Uniform:
    """Every question has weight 1."""

    reward: str | None = None
    """Unused; every question weight has this key."""

    def __call__(self, scores_PG: Tensor, accuracy_PG: Tensor) -> Tensor:
        return scores_PG.new_ones(scores_PG.shape[0])


@part("algorithm/question_weight", "difficulty")
class Difficulty:
    """N x softmax(-mean accuracy / T) over the N questions whose score is not constant; the others have weight 1.

    A group with mean accuracy 0, or with no accuracy at all, is weighted as if its accuracy were 1, because it
    contains no correct answer to learn from. DGPO's DQW, MathForge (arXiv 2601.20614).
    """

    needs_accuracy = True

    temperature: float = 2.0
    """Softmax temperature; a lower temperature gives hard questions more weight."""
    reward: str | None = None
    """Name of the reward used as accuracy. null: the reward used to evaluate the question's task (`eval.reward`, or
    else the task's first reward)."""

    def __post_init__(self) -> None:
        require(self, "temperature", 1e-6 <= self.temperature < math.inf, "must be above 0 (at least 1e-6) and finite")

    def check_run(self, run: Run) -> None:
        """Require a reward of this run."""
        if self.reward is not None:
            one_of(self, "reward", run.reward, "one of this run's rewards:")

    def __call__(self, scores_PG: Tensor, accuracy_PG: Tensor) -> Tensor:
        informative_P = ~constant_P1(scores_PG).squeeze(1)
        mean_P = mean_P1(accuracy_PG).squeeze(1)
        unsolved_P = (mean_P == 0) | (count_P1(accuracy_PG).squeeze(1) == 0)
        logits_P = (-mean_P.masked_fill(unsolved_P, 1.0) / self.temperature).masked_fill(~informative_P, float("-inf"))
        weights_P = logits_P.softmax(0) * informative_P.sum()
        return weights_P.where(informative_P, weights_P.new_ones(()))
