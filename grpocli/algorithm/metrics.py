"""What a loss tells about itself, as scalars on the device that add up over the parts of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm.aggregate import Totals

OF_COMPUTED = ("token_mult_prob_error", "sampling_importance_ratio", "approx_entropy", "entropy")
"""Means over the tokens that are computed; without any, there is no such metric."""


def loss_metrics(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    rollout_logp_BT: Tensor,
    mask_BT: Tensor,
    totals: Totals,
    kl_BT: Tensor | None,
    clipped: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Means over the window's tokens of the first two, and over its computed tokens (`Totals.skipped`) of the others:

    clip_ratio/low_mean: r < 1 - low and A < 0; clip_ratio/high_mean: r > 1 + high and A > 0 (as TRL);
    clip_ratio/region_mean: either. With a ratio a sequence they are means over rows; an objective that does not
    clip has none. kl: of the estimator chosen.
    token_mult_prob_error = exp |trainer - sampler|; sampling_importance_ratio = exp(trainer - sampler);
    approx_entropy = -exp(current - sampler) x current (as NeMo RL).
    """
    logp_BT = logp_BT.detach()

    def token_mean(values_BT: Tensor) -> Tensor:
        return (values_BT * mask_BT).sum() / max(totals.tokens - totals.skipped, 1)

    def clip_mean(flags: Tensor) -> Tensor:
        tokens = flags.shape == mask_BT.shape
        return (flags * mask_BT).sum() / max(totals.tokens, 1) if tokens else flags.sum() / max(totals.rows, 1)

    gap_BT = old_logp_BT - rollout_logp_BT
    metrics = {
        "token_mult_prob_error": token_mean(gap_BT.abs().exp()),
        "sampling_importance_ratio": token_mean(gap_BT.exp()),
        "approx_entropy": token_mean(-(logp_BT - rollout_logp_BT).exp() * logp_BT),
    }
    for side, flags in clipped.items():
        metrics[f"clip_ratio/{side}_mean"] = clip_mean(flags.to(logp_BT.dtype))
    if clipped:
        metrics["clip_ratio/region_mean"] = sum(
            (metrics[f"clip_ratio/{side}_mean"] for side in clipped), logp_BT.new_zeros(())
        )
    if kl_BT is not None:
        metrics["kl"] = token_mean(kl_BT.detach())
    return metrics
