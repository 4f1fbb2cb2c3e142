"""The policy-gradient term of each token, to be minimised, before correction, KL and aggregation.

All take log-probs [B, T] (nats), advantages [B] and a mask [B, T] of 0/1, and return the loss [B, T] and the
clipped tokens by name ([B, T], or [B, 1] where the ratio is one of the sequence).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    from torch import Tensor


@part("algorithm/objective", "clip")
class Clip:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_old.

    GRPO (arXiv 2402.03300), equation 3; `high` > `low` is DAPO's clip-higher (arXiv 2503.14476), section 3.1.
    level: `token`, or `sequence` for GSPO's length-normalised ratio (arXiv 2507.18071), equation 7.
    dual: where A < 0 the term is at least dual x A, dual > 1 (arXiv 1912.09729), section 4.
    delta: r is first cut at delta, INTELLECT-2's two-sided clipping (arXiv 2505.07291), section 3.4.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    delta: float | None = None
    level: str = "token"

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
        worse = gain.minimum(clipped_gain)
        if self.dual is not None:
            worse = worse.maximum(self.dual * advantages_B1).where(advantages_B1 < 0, worse)
        low = (ratio < 1 - self.low) & (advantages_B1 < 0)
        high = (ratio > 1 + self.high) & (advantages_B1 > 0)
        return -worse.expand_as(logp_BT), {"low": low, "high": high}


@part("algorithm/objective", "cispo")
class Cispo:
    """-sg(min(r, 1 + high)) A log pi: every token keeps a gradient. MiniMax-M1 (arXiv 2506.13585), equation 4."""

    high: float = 4.0

    def __post_init__(self) -> None:
        require(self, "high", self.high >= 0, "must be 0 or more")

    def __call__(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (logp_BT.detach() - old_logp_BT).exp()
        advantages_B1 = advantages_B.unsqueeze(1)
        loss_BT = -ratio.clamp(max=1 + self.high) * advantages_B1 * logp_BT
        return loss_BT, {"high": (ratio > 1 + self.high) & (advantages_B1 > 0)}


@part("algorithm/objective", "sapo")
class Sapo:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate for the clip. SAPO (arXiv 2511.20347)."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        require(self, "tau_positive", self.tau_positive > 0, "must be above 0")
        require(self, "tau_negative", self.tau_negative > 0, "must be above 0")

    def __call__(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (logp_BT - old_logp_BT).exp()
        advantages_B1 = advantages_B.unsqueeze(1)
        tau_B1 = advantages_B1.new_full((), self.tau_positive).where(
            advantages_B1 > 0, advantages_B1.new_full((), self.tau_negative)
        )
        gate = (tau_B1 * (ratio - 1)).sigmoid() * 4 / tau_B1
        return -gate * advantages_B1, {}


def log_ratio(logp_BT: Tensor, base_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """log(pi / base) of each token [B, T], or its mean over the sequence's tokens [B, 1]."""
    difference_BT = (logp_BT - base_BT) * mask_BT
    if level == "token":
        return difference_BT
    return difference_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
