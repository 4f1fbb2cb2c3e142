"""Advantages from the scores of groups. `scores_PG` is [prompts, group]; NaN means no score, advantage 0."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpocli.algorithm.statistics import centred_PG, count_P1, std_P1
from grpocli.config.formula import Formula
from grpocli.config.parts import part, require, section

if TYPE_CHECKING:
    from torch import Tensor

ZERO = "A_i = 0 for a completion without a score, and if all scores of the group are equal."


@section("algorithm.advantage")
class Quotient:
    """Base of the advantages that are divided by the spread of the scores."""

    eps: float = 1e-4
    """Added to the denominator to keep advantages bounded when the spread of the scores is near 0."""

    def __post_init__(self) -> None:
        require(self, "eps", 0 <= self.eps < math.inf, "must be a finite number of 0 or more")


@part("algorithm/advantage", "std")
class Std(Quotient):
    """(r - mean) / (std + eps), std with ddof 1. GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return _divide(centred_PG(scores_PG), std_P1(scores_PG), self.eps)

    def formula(self) -> Formula:
        return Formula(
            ("A_i = (s_i − mean_G s) / (std_G s + ε)", "std_G s = √( Σ_G (s − mean_G s)² / (n − 1) ),  n scores"),
            {"ε": "eps"},
            ("GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2",),
            ZERO,
        )


@part("algorithm/advantage", "center")
class Center:
    """r - mean, without division by the std, which would weight questions by difficulty.

    Dr. GRPO (arXiv 2503.20783), section 3.2.
    """

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return centred_PG(scores_PG)

    def formula(self) -> Formula:
        return Formula(("A_i = s_i − mean_G s",), source=("Dr. GRPO (arXiv 2503.20783), section 3.2",), note=ZERO)


@part("algorithm/advantage", "mad")
class Mad(Quotient):
    """(r - mean) / (MAD + eps), MAD = mean |r - mean|. DGPO's DGAE, MathForge (arXiv 2601.20614)."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        centred = centred_PG(scores_PG)
        mad_P1 = centred.abs().sum(1, keepdim=True) / count_P1(scores_PG).clamp(min=1)
        return _divide(centred, mad_P1, self.eps)

    def formula(self) -> Formula:
        return Formula(
            ("A_i = (s_i − mean_G s) / (MAD_G s + ε)", "MAD_G s = mean_G |s − mean_G s|"),
            {"ε": "eps"},
            ("DGPO's DGAE, MathForge (arXiv 2601.20614)",),
            ZERO,
        )


@part("algorithm/advantage", "batch_std")
class BatchStd(Quotient):
    """(r - group mean) / (std over the whole batch + eps), ddof 1. "Part I: Tricks or Traps?" (arXiv 2508.08221)."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return _divide(centred_PG(scores_PG), std_P1(scores_PG.reshape(1, -1)), self.eps)

    def formula(self) -> Formula:
        return Formula(
            ("A_i = (s_i − mean_G s) / (std s + ε)", "std s = √( Σ (s − mean s)² / (n − 1) ),  the step's n scores"),
            {"ε": "eps"},
            ('"Tricks or Traps?" (arXiv 2508.08221)',),
            ZERO,
        )


@part("algorithm/advantage", "leave_one_out")
class LeaveOneOut:
    """r - mean of the other completions. RLOO (arXiv 2402.14740), equation 9."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        n_P1 = count_P1(scores_PG)
        return centred_PG(scores_PG) * n_P1 / (n_P1 - 1).clamp(min=1)

    def formula(self) -> Formula:
        return Formula(
            ("A_i = s_i − Σ_G,j≠i s_j / (n − 1),  n scores", "    = (s_i − mean_G s) n / (n − 1)"),
            source=("RLOO (arXiv 2402.14740), equation 9",),
            note=ZERO,
        )


def _divide(centred_PG: Tensor, scale_P1: Tensor, eps: float) -> Tensor:
    """centred / (scale + eps), where 0 / 0 is 0: with eps 0 the advantages of a constant group are 0, too."""
    return (centred_PG / (scale_P1 + eps)).masked_fill(centred_PG == 0, 0.0)
