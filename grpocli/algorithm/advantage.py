"""How a group's scores become advantages. `scores_PG` is [prompts, group]; NaN means "no score", advantage 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.algorithm.statistics import centred_PG, count_P1, std_P1
from grpocli.config.parts import part, require

if TYPE_CHECKING:
    from torch import Tensor


@part("algorithm/advantage", "std")
class Std:
    """(r - mean) / (std + eps), std with ddof 1. GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2."""

    eps: float = 1e-4

    def __post_init__(self) -> None:
        require(self, "eps", self.eps >= 0, "must be 0 or more")

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return _divide(centred_PG(scores_PG), std_P1(scores_PG), self.eps)


@part("algorithm/advantage", "center")
class Center:
    """r - mean. Dr. GRPO (arXiv 2503.20783), section 3.2: no weight by how hard a question is."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return centred_PG(scores_PG)


@part("algorithm/advantage", "mad")
class Mad:
    """(r - mean) / (MAD + eps), MAD = mean |r - mean|. DGPO's DGAE, MathForge (arXiv 2601.20614)."""

    eps: float = 1e-4

    def __post_init__(self) -> None:
        require(self, "eps", self.eps >= 0, "must be 0 or more")

    def __call__(self, scores_PG: Tensor) -> Tensor:
        centred = centred_PG(scores_PG)
        mad_P1 = centred.abs().sum(1, keepdim=True) / count_P1(scores_PG).clamp(min=1)
        return _divide(centred, mad_P1, self.eps)


@part("algorithm/advantage", "batch_std")
class BatchStd:
    """(r - group mean) / (std over the whole batch + eps), ddof 1. "Part I: Tricks or Traps?" (arXiv 2508.08221)."""

    eps: float = 1e-4

    def __post_init__(self) -> None:
        require(self, "eps", self.eps >= 0, "must be 0 or more")

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return _divide(centred_PG(scores_PG), std_P1(scores_PG.reshape(1, -1)), self.eps)


@part("algorithm/advantage", "leave_one_out")
class LeaveOneOut:
    """r - mean of the other completions. RLOO (arXiv 2402.14740), equation 9."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        n_P1 = count_P1(scores_PG)
        return centred_PG(scores_PG) * n_P1 / (n_P1 - 1).clamp(min=1)


def _divide(centred_PG: Tensor, scale_P1: Tensor, eps: float) -> Tensor:
    """centred / (scale + eps), and 0 / 0 = 0: with eps 0 a constant group still has no advantage."""
    return (centred_PG / (scale_P1 + eps)).masked_fill(centred_PG == 0, 0.0)
