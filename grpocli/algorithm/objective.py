"""Policy-gradient terms of tokens, to be minimised, before correction, KL and aggregation.

Each takes log-probs [B, T] (nats), advantages [B] and a mask [B, T] of 0/1, and returns the loss [B, T] and flags of
clipped tokens by side ([B, T], or [B] for a sequence ratio).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpocli.config.formula import Formula
from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    from torch import Tensor

FARTHEST = 20.0
"""Nats. Ratios beyond exp(+-20) are clamped, without gradient. No sensible clip range is that wide, and exp(89),
infinite in float32, times an advantage of 0 is NaN."""

SHARPNESS = "must be above 0 (at least 1e-6) and finite"

RATIO = "r_it = π_θ(o_it) / π_old(o_it)"


@part("algorithm/objective", "clip")
class Clip:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi_theta / pi_old.

    GRPO (arXiv 2402.03300), equation 3; `high` > `low` is DAPO's clip-higher (arXiv 2503.14476), section 3.1.
    """

    zero_at_zero_advantage = True  # loss and gradient are 0 where the advantage is 0

    low: float = 0.2
    """How far the ratio may fall below 1, 0 to 1."""
    high: float = 0.2
    """How far the ratio may rise above 1, at least 0."""
    dual: float | None = None
    """Dual clip: where A < 0 the gain min(...) is at least `dual` x A, so that a large ratio cannot dominate the
    update. Above 1; null: no bound (arXiv 1912.09729), section 4."""
    delta: float | None = None
    """Upper bound of the unclipped ratio; null: none. Above 1 + high: INTELLECT-2's two-sided clipping
    (arXiv 2505.07291), section 3.4."""
    level: str = "token"
    """`token`, or `sequence` for GSPO's length-normalised ratio (arXiv 2507.18071), equation 7."""

    def __post_init__(self) -> None:
        require(self, "low", 0 <= self.low <= 1, "must be between 0 and 1")
        require(self, "high", self.high >= 0, "must be 0 or more")
        require(self, "dual", self.dual is None or self.dual > 1, "must be above 1, or null for none")
        require(
            self,
            "delta",
            self.delta is None or self.delta > 1 + self.high,
            "must be above 1 + algorithm.objective.high, or null for none",
        )
        one_of(self, "level", ("token", "sequence"))

    def __call__(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logp_BT, old_logp_BT, mask_BT, self.level).exp()
        advantages_B1 = advantages_B.unsqueeze(1)
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        gain = bounded * advantages_B1
        clipped_gain = ratio.clamp(1 - self.low, 1 + self.high) * advantages_B1
        surrogate = gain.minimum(clipped_gain)
        if self.dual is not None:
            surrogate = surrogate.maximum(self.dual * advantages_B1).where(advantages_B1 < 0, surrogate)
        clipped_low = (ratio < 1 - self.low) & (advantages_B1 < 0)
        clipped_high = (ratio > 1 + self.high) & (advantages_B1 > 0)
        if self.level == "sequence":  # [B], since [B, 1] would look like flags of tokens if T is 1
            clipped_low, clipped_high = clipped_low.squeeze(1), clipped_high.squeeze(1)
        return -surrogate.expand_as(logp_BT), {"low": clipped_low, "high": clipped_high}

    def formula(self) -> Formula:
        sequence = self.level == "sequence"
        r = "r_i" if sequence else "r_it"
        ratio = "r_i = ( Π_t π_θ(o_it) / π_old(o_it) )^(1 / |o_i|)" if sequence else RATIO
        bounded = r if self.delta is None else r.replace("r", "b")
        gain = f"min({bounded} A_i, clip({r}, 1 − ε_low, 1 + ε_high) A_i)"
        lines, symbols = [ratio], {"ε_low": "low", "ε_high": "high"}
        if self.delta is not None:
            lines.append(f"{bounded} = min({r}, δ)")
            symbols["δ"] = "delta"
        if self.dual is None:
            lines.append(f"ℓ_it = −{gain}")
        else:
            lines += [f"g_it = {gain}", "ℓ_it = −g_it where A_i ≥ 0,  −max(g_it, c A_i) where A_i < 0"]
            symbols["c"] = "dual"
        return Formula(tuple(lines), symbols, tuple(self._sources()))

    def _sources(self) -> Iterator[str]:
        yield "GRPO, DeepSeekMath (arXiv 2402.03300), equation 3"
        if self.high > self.low:
            yield "clip-higher: DAPO (arXiv 2503.14476), section 3.1"
        if self.level == "sequence":
            yield "sequence ratio: GSPO (arXiv 2507.18071), equation 7"
        if self.dual is not None:
            yield "dual clip: arXiv 1912.09729, section 4"
        if self.delta is not None:
            yield "two-sided clip: INTELLECT-2 (arXiv 2505.07291), section 3.4"


@part("algorithm/objective", "cispo")
class Cispo:
    """-sg(min(r, 1 + high)) A log pi_theta: every token keeps a gradient. MiniMax-M1 (arXiv 2506.13585), equation 4."""

    zero_at_zero_advantage = True

    high: float = 4.0
    """How far the weight may rise above 1, at least 0."""

    def __post_init__(self) -> None:
        require(self, "high", self.high >= 0, "must be 0 or more")

    def __call__(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logp_BT.detach(), old_logp_BT, mask_BT, "token").exp()
        advantages_B1 = advantages_B.unsqueeze(1)
        loss_BT = -ratio.clamp(max=1 + self.high) * advantages_B1 * logp_BT
        return loss_BT, {"high": (ratio > 1 + self.high) & (advantages_B1 > 0)}

    def formula(self) -> Formula:
        return Formula(
            (RATIO, "ℓ_it = −sg[ min(r_it, 1 + ε_high) ] A_i log π_θ(o_it)"),
            {"ε_high": "high"},
            ("CISPO, MiniMax-M1 (arXiv 2506.13585), equation 4",),
            "sg[ ]: a constant, without gradient.",
        )


@part("algorithm/objective", "sapo")
class Sapo:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate for the clip. SAPO (arXiv 2511.20347)."""

    zero_at_zero_advantage = True

    tau_positive: float = 1.0
    """Sharpness of the gate where A > 0."""
    tau_negative: float = 1.05
    """Sharpness of the gate where A <= 0."""

    def __post_init__(self) -> None:
        require(self, "tau_positive", 1e-6 <= self.tau_positive < math.inf, SHARPNESS)
        require(self, "tau_negative", 1e-6 <= self.tau_negative < math.inf, SHARPNESS)

    def __call__(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logp_BT, old_logp_BT, mask_BT, "token").exp()
        advantages_B1 = advantages_B.unsqueeze(1)
        tau_B1 = advantages_B1.new_full((), self.tau_positive).where(
            advantages_B1 > 0, advantages_B1.new_full((), self.tau_negative)
        )
        gate = (tau_B1 * (ratio - 1)).sigmoid() * 4 / tau_B1
        return -gate * advantages_B1, {}

    def formula(self) -> Formula:
        return Formula(
            (
                RATIO,
                "ℓ_it = −(4 / τ) σ(τ (r_it − 1)) A_i",
                "τ = τ_pos where A_i > 0, else τ_neg",
            ),
            {"τ_pos": "tau_positive", "τ_neg": "tau_negative"},
            ("SAPO (arXiv 2511.20347)",),
            "σ(x) = 1 / (1 + exp(−x))",
        )


def log_ratio(logp_BT: Tensor, base_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """log(pi / pi_base) of each token [B, T], or its mean over the sequence's tokens [B, 1]."""
    difference_BT = ((logp_BT - base_BT) * mask_BT).clamp(-FARTHEST, FARTHEST)
    if level == "token":
        return difference_BT
    return difference_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
