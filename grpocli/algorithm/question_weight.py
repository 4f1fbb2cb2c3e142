"""How much each question counts. `accuracy_PG` is one named reward, `scores_PG` the summed score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.algorithm.statistics import constant_P1, count_P1, mean_P1
from grpocli.config.parts import part, require

if TYPE_CHECKING:
    from torch import Tensor


@part("algorithm/question_weight", "uniform")
class Uniform:
    """Every question weighs 1."""

    reward: str | None = None

    def __call__(self, scores_PG: Tensor, accuracy_PG: Tensor) -> Tensor:
        return scores_PG.new_ones(scores_PG.shape[0])


@part("algorithm/question_weight", "difficulty")
class Difficulty:
    """N x softmax(-mean accuracy / T) over the N questions whose score is not constant; the others weigh 1.

    A mean accuracy of 0, or none at all, counts as 1: nothing right was seen there to learn from.
    DGPO's DQW, MathForge (arXiv 2601.20614). `reward` names the accuracy (null: the first reward).
    """

    temperature: float = 2.0
    reward: str | None = None

    def __post_init__(self) -> None:
        require(self, "temperature", self.temperature > 0, "must be above 0")

    def __call__(self, scores_PG: Tensor, accuracy_PG: Tensor) -> Tensor:
        informative_P = ~constant_P1(scores_PG).squeeze(1)
        mean_P = mean_P1(accuracy_PG).squeeze(1)
        unknown_P = (mean_P == 0) | (count_P1(accuracy_PG).squeeze(1) == 0)
        logits_P = (-mean_P.masked_fill(unknown_P, 1.0) / self.temperature).masked_fill(~informative_P, float("-inf"))
        weights_P = logits_P.softmax(0) * informative_P.sum()
        return weights_P.where(informative_P, weights_P.new_ones(()))
