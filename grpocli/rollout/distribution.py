"""The sampling distribution, shared by the sampler and the trainer that scores its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpocli.rollout.sampling import apply_repetition_penalty

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.types import Sampling

BLOCK = 64
"""Block size of `draw` in tokens; probabilities inside a block are summed in float32."""
BELOW_1 = 1 - 2**-53
"""The last number before 1 in float64."""


def sampling_logits(
    logits_NV: Tensor, sampling: Sampling, keep_N: Tensor | None = None, seen_NV: Tensor | None = None
) -> Tensor:
    """Logits [N, V] (float32) after repetition penalty, temperature, min_p, top_k and top_p, in vLLM's order.

    Truncated tokens have -inf. With temperature 0 the logits are neither scaled nor truncated; the sampler takes the
    argmax. keep_N: tokens that are never truncated, so that a token sampled under slightly different weights keeps a
    finite log-prob. seen_NV: the tokens to penalise (bool); needed unless the penalty is 1.
    """
    logits_NV = logits_NV.float()
    if sampling.repetition_penalty != 1:
        if seen_NV is None:
            raise ValueError("seen_NV is required unless repetition_penalty is 1")
        logits_NV = apply_repetition_penalty(logits_NV, seen_NV, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits_NV
    if sampling.temperature != 1:
        logits_NV = logits_NV / sampling.temperature
    if not sampling.truncates:
        return logits_NV
    truncated_NV = _truncated(logits_NV.detach(), sampling)
    if keep_N is not None:
        truncated_NV = truncated_NV.scatter(1, keep_N.unsqueeze(1), False)
    return logits_NV.masked_fill(truncated_NV, float("-inf"))


def _truncated(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    truncated_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    if sampling.min_p > 0:
        probs_NV = logits_NV.softmax(-1)
        truncated_NV |= probs_NV < sampling.min_p * probs_NV.amax(-1, keepdim=True)
    left_NV = logits_NV.masked_fill(truncated_NV, float("-inf"))
    if 0 < sampling.top_k < logits_NV.shape[1]:
        kth_N1 = left_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        left_NV = left_NV.masked_fill(left_NV < kth_N1, float("-inf"))
    if sampling.top_p < 1:
        sorted_NV, order_NV = left_NV.sort(dim=-1, descending=True)
        before_NV = sorted_NV.softmax(-1).cumsum(-1) - sorted_NV.softmax(-1)
        beyond_NV = before_NV >= sampling.top_p
        beyond_NV[:, 0] = False
        left_NV = left_NV.masked_fill(beyond_NV.scatter(1, order_NV, beyond_NV), float("-inf"))
    return left_NV.isinf()


def draw(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution at uniform_N (float64) in [0, 1).

    With one uniform number for each token, a row depends on its own seed alone, not on its batch. The inversion first
    finds a BLOCK of tokens, then the token in it, so that float64 sums cover only blocks and one block of each row.
    """
    padding = -probs_NV.shape[1] % BLOCK
    probs_NKS = torch.nn.functional.pad(probs_NV, (0, padding)).unflatten(1, (-1, BLOCK))
    block_N1, within_N1 = _invert(probs_NKS.sum(-1), uniform_N.unsqueeze(1))
    probs_NS = probs_NKS.take_along_dim(block_N1.unsqueeze(2), 1).squeeze(1)
    place_N1, _ = _invert(probs_NS, within_N1)
    token_N = (block_N1 * BLOCK + place_N1).squeeze(1)
    # NaN probabilities could give an index out of range; the update reports NaN weights
    return token_N.clamp(max=probs_NV.shape[1] - 1)


def _invert(mass_NK: Tensor, uniform_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The position where the cumulative sum passes a share of the total, and the fraction within it, in [0, 1)."""
    cdf_NK = mass_NK.cumsum(-1, dtype=torch.float64)
    target_N1 = uniform_N1 * cdf_NK[:, -1:]
    place_N1 = torch.searchsorted(cdf_NK, target_N1, right=True).clamp(max=mass_NK.shape[1] - 1)
    mass_N1 = mass_NK.gather(1, place_N1).double()
    within_N1 = 1 - (cdf_NK.gather(1, place_N1) - target_N1) / mass_N1
    return place_N1, within_N1.clamp(0, BELOW_1)
