"""Group statistics that leave out NaN, the mark of "no reward applies to this completion"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def count_P1(scores_PG: Tensor) -> Tensor:
    """How many completions of each group have a score."""
    return (~scores_PG.isnan()).sum(1, keepdim=True)


def mean_P1(scores_PG: Tensor) -> Tensor:
    """Mean of each group's scores; 0 for a group without any."""
    return scores_PG.nan_to_num(nan=0.0).sum(1, keepdim=True) / count_P1(scores_PG).clamp(min=1)


def constant_P1(scores_PG: Tensor) -> Tensor:
    """Whether a group's scores are all equal, so that it says nothing about which completion is better.

    Up to rounding: sums of rewards such as 0.1 + 0.2 and 0.3 + 0.0 are equal.
    """
    lowest_P1 = scores_PG.nan_to_num(nan=float("inf")).amin(1, keepdim=True)
    highest_P1 = scores_PG.nan_to_num(nan=float("-inf")).amax(1, keepdim=True)
    size_P1 = scores_PG.nan_to_num(nan=0.0).abs().amax(1, keepdim=True)
    return highest_P1 - lowest_P1 <= rounding(size_P1)


def rounding(size: Tensor) -> Tensor:
    """How far apart equal sums of numbers of this size may be."""
    import torch

    return 8 * torch.finfo(size.dtype).eps * size


def centred_PG(scores_PG: Tensor) -> Tensor:
    """score - group mean; exactly 0 where there is no score or the group is constant.

    The mean of equal numbers may differ from them by a rounding error, which a division by a standard
    deviation of 0 + eps would blow up: constant groups are therefore zeroed, not subtracted.
    """
    centred = scores_PG - mean_P1(scores_PG)
    return centred.masked_fill(scores_PG.isnan() | constant_P1(scores_PG), 0.0)


def std_P1(scores_PG: Tensor) -> Tensor:
    """Sample standard deviation (ddof 1) of each group; 0 where fewer than two scores exist."""
    squares_P1 = centred_PG(scores_PG).square().sum(1, keepdim=True)
    return (squares_P1 / (count_P1(scores_PG) - 1).clamp(min=1)).sqrt()
