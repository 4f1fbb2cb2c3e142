"""Group statistics that leave out NaN, which means that no reward applies to the completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def count_P1(scores_PG: Tensor) -> Tensor:
    """Number of completions with a score in each group."""
    return (~scores_PG.isnan()).sum(1, keepdim=True)


def mean_P1(scores_PG: Tensor) -> Tensor:
    """Mean of each group's scores; 0 for a group without scores."""
    return scores_PG.nan_to_num(nan=0.0).sum(1, keepdim=True) / count_P1(scores_PG).clamp(min=1)


def constant_P1(scores_PG: Tensor) -> Tensor:
    """Whether a group's scores are all equal, so that none of its completions is better than another.

    Equal up to rounding, as the sums of rewards 0.1 + 0.2 and 0.3 + 0.0 are.
    """
    lowest_P1 = scores_PG.nan_to_num(nan=float("inf")).amin(1, keepdim=True)
    highest_P1 = scores_PG.nan_to_num(nan=float("-inf")).amax(1, keepdim=True)
    size_P1 = scores_PG.nan_to_num(nan=0.0).abs().amax(1, keepdim=True)
    return highest_P1 - lowest_P1 <= rounding(size_P1)


def rounding(size: Tensor) -> Tensor:
    """Largest rounding difference of equal sums of numbers of this size."""
    import torch

    return 8 * torch.finfo(size.dtype).eps * size


def centred_PG(scores_PG: Tensor) -> Tensor:
    """score - group mean; exactly 0 without a score or in a constant group.

    The mean of equal numbers may differ from them by a rounding error, which a division by 0 + eps would amplify. So
    constant groups are set to 0.
    """
    centred = scores_PG - mean_P1(scores_PG)
    return centred.masked_fill(scores_PG.isnan() | constant_P1(scores_PG), 0.0)


def std_P1(scores_PG: Tensor) -> Tensor:
    """Sample standard deviation (ddof 1) of each group; 0 for fewer than two scores."""
    squares_P1 = centred_PG(scores_PG).square().sum(1, keepdim=True)
    return (squares_P1 / (count_P1(scores_PG) - 1).clamp(min=1)).sqrt()
