"""Metrics of a loss: scalars on the device, which combine over the parts of a window."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm.aggregate import Totals

OF_THE_GAP = (
    "token_mult_prob_error",
    "sampling_importance_ratio",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
)
"""Metrics of the gap between the sampler's and the trainer's probabilities."""

MEANS_OVER_COMPUTED = (
    *OF_THE_GAP,
    "approx_entropy",
    "entropy",
)
"""Means over the computed tokens; without such tokens the metric is missing."""

EXTREMES = {"clip_ratio/low_min": -1, "clip_ratio/high_max": 1}
"""Metrics that combine as a minimum (-1) or a maximum (1) over the parts of a window; all others are sums."""


def combined(name: str, one: float, other: float) -> float:
    """A metric of two parts of a window together."""
    sign = EXTREMES.get(name)
    return one + other if sign is None else sign * max(sign * one, sign * other)


def loss_metrics(
    logp_BT: Tensor,
    trainer_logp_BT: Tensor,
    rollout_logp_BT: Tensor | None,
    mask_BT: Tensor,
    totals: Totals,
    clipped: dict[str, Tensor],
    kl_BT: Tensor | None = None,
) -> dict[str, Tensor]:
    """Metrics of the gap between sampler and trainer, of clipping, and of the KL estimate.

    Except those of clipping, they are means over the window's computed tokens (see `Totals.skipped`).
    trainer_logp_BT: the trainer's log-probs that the sampler's are compared with.
    kl_BT: the chosen estimate.
    Without the sampler's log-probs the metrics of the gap are missing, and approx_entropy uses the trainer's.
    """
    import torch

    logp_BT = logp_BT.detach()
    values = {} if rollout_logp_BT is None else gap_metrics(trainer_logp_BT, rollout_logp_BT)
    sampler_BT = trainer_logp_BT if rollout_logp_BT is None else rollout_logp_BT
    values["approx_entropy"] = -(logp_BT - sampler_BT).exp() * logp_BT
    if kl_BT is not None:
        values["kl"] = kl_BT.detach()
    # all in one tensor: on a GPU each operation is a launch
    means_M = torch.stack(list(values.values())).mul_(mask_BT).sum((1, 2)) / max(totals.tokens - totals.skipped, 1)
    metrics = dict(zip(values, means_M.unbind(), strict=True))
    for side, flags in clipped.items():
        metrics |= _clip_metrics(side, flags.to(logp_BT.dtype), mask_BT, totals)
    if sides := [side for side in clipped if side != "dropped"]:
        means = [metrics[f"clip_ratio/{side}_mean"] for side in sides]
        metrics["clip_ratio/region_mean"] = torch.stack(means).sum()
    return metrics


def gap_metrics(trainer_BT: Tensor, sampler_BT: Tensor) -> dict[str, Tensor]:
    """Metrics [B, T] of the trainer's and the sampler's log-probs, as NeMo RL's GRPO guide and loss define them.

    token_mult_prob_error = exp |trainer - sampler|; sampling_importance_ratio = exp(trainer - sampler).
    gen_kl_error, policy_kl_error: KL(sampler || trainer) and KL(trainer || sampler); js_divergence_error: the mean KL
    of the two to their mixture (p + q) / 2. Each by the estimator k3 on the sampler's tokens, without a bound.
    """
    gap_BT = trainer_BT - sampler_BT
    mixture_BT = trainer_BT.logaddexp(sampler_BT) - math.log(2)
    return {
        "token_mult_prob_error": gap_BT.abs().exp(),
        "sampling_importance_ratio": gap_BT.exp(),
        "gen_kl_error": _k3(gap_BT),
        "policy_kl_error": _k3(-gap_BT),
        "js_divergence_error": (_k3(trainer_BT - mixture_BT) + _k3(sampler_BT - mixture_BT)) / 2,
    }


def _k3(x_BT: Tensor) -> Tensor:
    """exp(x) - x - 1, exact for the usual small gaps."""
    return x_BT.expm1() - x_BT


def _clip_metrics(side: str, flags: Tensor, mask_BT: Tensor, totals: Totals) -> dict[str, Tensor]:
    """Clipping metrics as in TRL. flags [B, T], or [B] for sequence ratios: r < 1 - low and A < 0, or r > 1 + high and
    A > 0.

    low_mean, high_mean, dropped_mean: share of the window's tokens, or rows. low_min, high_max: smallest and largest
    share in a part of the window, of tokens or of rows with a token. Tokens that are not computed are one more part,
    without clipped tokens; parts without tokens do not count.
    """
    of_tokens = flags.shape == mask_BT.shape
    clipped = (flags * mask_BT).sum() if of_tokens else flags.sum()
    metrics = {f"clip_ratio/{side}_mean": clipped / max(totals.tokens if of_tokens else totals.rows, 1)}
    if side == "dropped":
        return metrics
    share = clipped / (mask_BT.sum() if of_tokens else mask_BT.any(1).sum()).clamp(min=1)
    if side == "high":
        metrics["clip_ratio/high_max"] = share
    else:
        least = share.where(mask_BT.any(), 1.0)
        metrics["clip_ratio/low_min"] = least * (totals.tokens > 0 and not totals.skipped)
    return metrics
