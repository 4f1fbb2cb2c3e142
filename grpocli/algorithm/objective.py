"""Policy-gradient terms of tokens, to be minimised, before correction, KL and aggregation.

Each takes log-probs [B, T] (nats), advantages [B] or [B, T] and a mask [B, T] of 0/1, and returns the loss [B, T] and
flags by side: clipped tokens ([B, T], or [B] for a sequence ratio), and `dropped` rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    from torch import Tensor

Terms = tuple["Tensor", dict[str, "Tensor"]]
"""The loss [B, T] and its flags by side: `low`, `high`, `dropped` ..."""

FARTHEST = 20.0
"""Nats. Ratios beyond exp(+-20) are clamped, without gradient. No sensible clip range is that wide, and exp(89),
infinite in float32, times an advantage of 0 is NaN."""

ALMOST_SURE = 1e-8


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
    """`token`, or `sequence` for GSPO's length-normalised ratio (arXiv 2507.18071), equation 7; with an advantage per
    token, GSPO-token, section 4.3."""
    drop_above: float | None = None
    """Off-policy sequence mask: a completion with A < 0 has no loss if its tokens' mean log(pi_old / pi_theta) exceeds
    this, in nats; null: no mask. DeepSeek-V3.2 (arXiv 2512.02556), equation 9, whose pi_old is the sampler:
    algorithm/correction=sampler."""

    def __post_init__(self) -> None:
        require(self, "low", 0 <= self.low <= 1, "must be between 0 and 1")
        require(self, "high", self.high >= 0, "must be 0 or more")
        require(self, "dual", self.dual is None or self.dual > 1, "must be above 1, or null for none")
        problem = "must be above 1 + algorithm.objective.high, or null for none"
        require(self, "delta", self.delta is None or self.delta > 1 + self.high, problem)
        one_of(self, "level", ("token", "sequence"))
        finite = self.drop_above is None or 0 <= self.drop_above < math.inf
        require(self, "drop_above", finite, "must be a finite number of 0 or more, or null for none")

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Terms:
        one_each = advantages.ndim == 1  # an advantage per row
        ratio = log_ratio(logp_BT, old_logp_BT, mask_BT, self.level).exp()
        if self.level == "sequence" and not one_each:  # GSPO-token: the sequence's ratio, each token's own gradient
            own_BT = log_ratio(logp_BT, old_logp_BT, mask_BT, "token")
            ratio = ratio.detach() * (own_BT - own_BT.detach()).exp()
        advantages = per_token(advantages)
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        gain = bounded * advantages
        clipped_gain = ratio.clamp(1 - self.low, 1 + self.high) * advantages
        surrogate = gain.minimum(clipped_gain)
        if self.dual is not None:
            surrogate = surrogate.maximum(self.dual * advantages).where(advantages < 0, surrogate)
        below, above = ratio < 1 - self.low, ratio > 1 + self.high
        sides = {"low": below & (advantages < 0), "high": above & (advantages > 0)}
        if self.drop_above is not None:
            away_B1 = -log_ratio(logp_BT.detach(), old_logp_BT, mask_BT, "sequence")
            sides["dropped"] = (advantages < 0) & (away_B1 > self.drop_above)
            surrogate = surrogate.masked_fill(sides["dropped"], 0.0)
        if one_each:  # [B] for flags of rows, since [B, 1] would look like flags of tokens if T is 1
            of_rows = ("low", "high", "dropped") if self.level == "sequence" else ("dropped",)
            sides = {side: flags.squeeze(1) if side in of_rows else flags for side, flags in sides.items()}
        return -surrogate.expand_as(logp_BT), sides


@part("algorithm/objective", "cispo")
class Cispo:
    """-sg(min(r, 1 + high)) A log pi_theta: every token keeps a gradient. MiniMax-M1 (arXiv 2506.13585), equation 4."""

    zero_at_zero_advantage = True

    high: float = 4.0
    """How far the weight may rise above 1, at least 0."""
    low: float | None = None
    """How far the weight may fall below 1, 0 to 1; null: no lower bound, as in the paper."""

    def __post_init__(self) -> None:
        require(self, "high", self.high >= 0, "must be 0 or more")
        require(self, "low", self.low is None or 0 <= self.low <= 1, "must be between 0 and 1, or null for none")

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Terms:
        ratio_BT = log_ratio(logp_BT.detach(), old_logp_BT, mask_BT, "token").exp()
        advantages = per_token(advantages)
        weight_BT = ratio_BT.clamp(max=1 + self.high)
        sides = {"high": (ratio_BT > 1 + self.high) & (advantages > 0)}
        if self.low is not None:
            weight_BT = weight_BT.clamp(min=1 - self.low)
            sides["low"] = (ratio_BT < 1 - self.low) & (advantages < 0)
        return -weight_BT * advantages * logp_BT, sides


@part("algorithm/objective", "sapo")
class Sapo:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate for the clip. SAPO (arXiv 2511.20347)."""

    zero_at_zero_advantage = True

    tau_positive: float = 1.0
    """Sharpness of the gate where A > 0."""
    tau_negative: float = 1.05
    """Sharpness of the gate where A <= 0."""

    def __post_init__(self) -> None:
        for name in ("tau_positive", "tau_negative"):
            ok = 1e-6 <= getattr(self, name) < math.inf
            require(self, name, ok, "must be above 0 (at least 1e-6) and finite")

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Terms:
        ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT, "token").exp()
        advantages = per_token(advantages)
        positive, negative = (advantages.new_full((), tau) for tau in (self.tau_positive, self.tau_negative))
        tau = positive.where(advantages > 0, negative)
        gate_BT = (tau * (ratio_BT - 1)).sigmoid() * 4 / tau
        return -gate_BT * advantages, {}


@part("algorithm/objective", "dppo")
class Dppo:
    """-M r A + drift log^2 r: M is 0 where the token's probability has moved too far in the direction of A.

    DPPO (arXiv 2602.04879): the trust region bounds probabilities instead of their ratio, which over-clips rare tokens.
    Its old policy is the sampler, so combine it with algorithm/correction=sampler. `drift` is prime-rl's addition, with
    the penalty of Kimi K2.5 (arXiv 2602.02276).
    """

    low: float = 0.2
    """How far a token with A < 0 may fall, as a `divergence` of at least 0. inf: no bound. 0.2 is prime-rl's; verl's
    example has 0.15 for `tv` and 0.05 for `kl`."""
    high: float = 0.2
    """How far a token with A > 0 may rise, as a `divergence` of at least 0. inf: no bound."""
    divergence: str = "tv"
    """Between the policies "this token or another one": `tv` is |pi_theta - pi_old|, equation 13; `kl` is
    KL(pi_old || pi_theta), equation 14."""
    drift: float = 0.0
    """Coefficient of log^2 r, which every token has, also a masked one; 0.001 in prime-rl."""

    def __post_init__(self) -> None:
        require(self, "low", self.low >= 0, "must be 0 or more; inf for no bound")
        require(self, "high", self.high >= 0, "must be 0 or more; inf for no bound")
        require(self, "drift", 0 <= self.drift < math.inf, "must be a finite number of 0 or more")
        one_of(self, "divergence", ("tv", "kl"))

    @property
    def zero_at_zero_advantage(self) -> bool:
        """As of `Clip`."""
        return self.drift == 0

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Terms:
        advantages = per_token(advantages)
        change_BT = logp_BT.detach().exp() - old_logp_BT.exp()
        moved_BT = change_BT.abs() if self.divergence == "tv" else binary_kl(old_logp_BT, logp_BT.detach())
        below_BT = (change_BT < 0) & (moved_BT > self.low)
        above_BT = (change_BT > 0) & (moved_BT > self.high)
        sides = {"low": below_BT & (advantages < 0), "high": above_BT & (advantages > 0)}
        ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT, "token").exp()
        loss_BT = -(ratio_BT * advantages).masked_fill(sides["low"] | sides["high"], 0.0)
        if self.drift:
            loss_BT = loss_BT + self.drift * ((logp_BT - old_logp_BT) * mask_BT).square()
        return loss_BT, sides


@part("algorithm/objective", "mirror")
class Mirror:
    """-A log pi_theta + tau / 2 log^2 r: the policy gradient with a quadratic penalty for leaving the old policy.

    Online policy mirror descent, Kimi k1.5 (arXiv 2501.12599), equation 3; DRO (arXiv 2405.19107). The penalty is that
    of each token, as in ROLL (`kimi15`), verl and Tinker (`dro`); Kimi's squares the log ratio of the whole completion.
    There is no importance weight: the gradient at A is that of log pi_theta, however far the policy has moved.
    """

    tau: float = 0.1
    """Coefficient of the penalty, at least 0; 0: the plain policy gradient. 0.1 is ROLL's; Kimi gives no value."""

    def __post_init__(self) -> None:
        require(self, "tau", 0 <= self.tau < math.inf, "must be a finite number of 0 or more")

    @property
    def zero_at_zero_advantage(self) -> bool:
        """As of `Clip`."""
        return self.tau == 0

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Terms:
        loss_BT = -per_token(advantages) * logp_BT
        if self.tau:
            loss_BT = loss_BT + self.tau / 2 * ((logp_BT - old_logp_BT) * mask_BT).square()
        return loss_BT, {}


@part("algorithm/objective", "geometric")
class Geometric:
    """-A times the geometric mean of a completion's ratios, each clipped in the direction of A first.

    GMPO (arXiv 2507.20673), equation 4. Every token carries its completion's term, so aggregate=sequence_mean is the
    paper's mean over completions.
    """

    zero_at_zero_advantage = True

    low: float = 0.4
    """How far a token's log ratio may fall below 0 where A < 0, in nats, at least 0."""
    high: float = 0.4
    """How far a token's log ratio may rise above 0 where A > 0, in nats, at least 0."""

    def __post_init__(self) -> None:
        require(self, "low", self.low >= 0, "must be 0 or more")
        require(self, "high", self.high >= 0, "must be 0 or more")

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> Terms:
        if advantages.ndim != 1:
            raise ValueError("algorithm/objective=geometric needs an advantage per row: loss(advantages=[B])")
        advantages_B1 = per_token(advantages)
        log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT, "token")
        below_BT, above_BT = log_ratio_BT < -self.low, log_ratio_BT > self.high
        sides = {"low": below_BT & (advantages_B1 < 0), "high": above_BT & (advantages_B1 > 0)}
        clipped_BT = log_ratio_BT.clamp(max=self.high).where(advantages_B1 > 0, log_ratio_BT.clamp(min=-self.low))
        mean_B1 = (clipped_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
        return -(advantages_B1 * mean_B1.exp()).expand_as(logp_BT), sides


def loss_and_flags(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss [B, T] and the flags that an objective returned; without flags if it returned a tensor."""
    loss_BT, flags = result if isinstance(result, tuple) else (result, None)
    return loss_BT, flags or {}


def per_token(advantages: Tensor) -> Tensor:
    """Advantages that broadcast over tokens: [B] as [B, 1], [B, T] unchanged."""
    return advantages.unsqueeze(1) if advantages.ndim == 1 else advantages


def binary_kl(old_logp_BT: Tensor, logp_BT: Tensor) -> Tensor:
    """KL(old || new) between the choices "this token" and "another token", in nats.

    Both probabilities of "another token" are raised by 1e-8, as in verl and SkyRL: a sure token's log-prob is exactly 0
    in float32, and the divergence would be infinite.
    """
    other_old_BT, other_BT = (-x.expm1().clamp(max=0) + ALMOST_SURE for x in (old_logp_BT, logp_BT))
    rest_BT = (other_old_BT - ALMOST_SURE) * (other_old_BT / other_BT).log()
    return old_logp_BT.exp() * (old_logp_BT - logp_BT) + rest_BT


def log_ratio(logp_BT: Tensor, base_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """log(pi / pi_base) of each token [B, T], or its mean over the sequence's tokens [B, 1]."""
    difference_BT = ((logp_BT - base_BT) * mask_BT).clamp(-FARTHEST, FARTHEST)
    if level == "token":
        return difference_BT
    return difference_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
