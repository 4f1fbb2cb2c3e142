"""KL penalties to a reference policy, for each token [B, T], in nats.

The estimators of http://joschu.net/blog/kl-approx.html, with x = log pi_ref - log pi_theta.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from grpocli.algorithm.objective import FARTHEST
from grpocli.config.formula import Formula
from grpocli.config.parts import part, require, section

if TYPE_CHECKING:
    from torch import Tensor


MAX_K3 = 10.0
"""Upper bound of a token's k3, in nats."""
BOUND = f"at most {MAX_K3:g}: NeMo RL (kl_output_clamp_value), verl (low_var_kl)"


@part("algorithm/kl", "none")
class NoKL:
    """No KL term; no reference model is loaded."""

    beta = 0.0
    sync_every = 0
    sync_alpha = 0.0

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
        return logp_BT.new_zeros(())

    def formula(self) -> Formula:
        return Formula(note="no reference model is loaded")


@section("algorithm.kl")
class KL:
    """Base of the three estimators."""

    estimator: ClassVar[tuple[str, ...]] = ()  # its formulas; the last is D_it
    sources: ClassVar[tuple[str, ...]] = ("joschu.net/blog/kl-approx.html",)

    beta: float = 0.04
    """KL coefficient in the loss; with 0, no reference model is loaded."""
    on_policy: bool = False
    """Multiply by the importance ratio pi_theta / pi_old, so that the estimate is an expectation under the current
    policy (NeMo RL's GRPO guide)."""
    sync_every: int = 0
    """Steps between updates of the reference; 0: never. It becomes alpha x policy + (1 - alpha) x reference, TR-DPO
    (arXiv 2404.09656)."""
    sync_alpha: float = 0.6
    """Weight of the policy in the reference update (alpha), 0 to 1."""

    def __post_init__(self) -> None:
        require(self, "beta", 0 <= self.beta < math.inf, "must be a finite number of 0 or more")
        require(self, "sync_every", self.sync_every >= 0, "must be 0 (never) or more")
        require(self, "sync_alpha", 0 <= self.sync_alpha <= 1, "must be between 0 and 1")

    def __call__(self, logp_BT: Tensor, old_logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
        kl_BT = self.estimate(ref_logp_BT - logp_BT)
        if not self.on_policy:
            return kl_BT
        return kl_BT * (logp_BT - old_logp_BT).clamp(-FARTHEST, FARTHEST).exp()

    def estimate(self, x_BT: Tensor) -> Tensor:
        raise NotImplementedError

    def clamped(self, logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor | None:
        """The tokens [B, T] whose estimate is at its bound; None if the estimator has no bound."""
        return None

    def formula(self) -> Formula:
        if not self.beta:
            return Formula(symbols={"β": "beta"}, note="β = 0, so no reference model is loaded")
        *before, estimate = self.estimator
        lines = ["x_it = log π_ref(o_it) − log π_θ(o_it)", *before, f"D_it = {estimate}"]
        symbols, sources = {"β": "beta"}, list(self.sources)
        if self.on_policy:
            lines[-1] = f"D_it = ( π_θ(o_it) / π_old(o_it) ) ({estimate})"
            sources.append("importance weight: NeMo RL's GRPO guide")
        if self.sync_every:
            lines.append("after every m steps:  θ_ref ← α θ + (1 − α) θ_ref")
            symbols |= {"m": "sync_every", "α": "sync_alpha"}
            sources.append("reference sync: TR-DPO (arXiv 2404.09656)")
        return Formula(tuple(lines), symbols, tuple(sources))


@part("algorithm/kl", "k1")
class K1(KL):
    """-x with x = log pi_ref - log pi_theta: unbiased, high variance, may be negative."""

    estimator = ("−x_it",)

    def estimate(self, x_BT: Tensor) -> Tensor:
        return -x_BT


@part("algorithm/kl", "k2")
class K2(KL):
    """x^2 / 2 with x = log pi_ref - log pi_theta: low variance, biased.

    On-policy, its expected gradient is that of the KL divergence.
    """

    estimator = ("x_it² / 2",)

    def estimate(self, x_BT: Tensor) -> Tensor:
        return x_BT.square() / 2


@part("algorithm/kl", "k3")
class K3(KL):
    """exp(x) - x - 1 with x = log pi_ref - log pi_theta: unbiased and never negative up to 10, where it is cut off.

    GRPO (arXiv 2402.03300), equation 4. The bound is that of NeMo RL and verl: exp(89) is infinite in float32. Beyond
    it, where x is above 2.6 or below -11, the KL term of a token has no gradient; `kl_clamped_ratio` is the share of
    such tokens. k1 and k2 cannot overflow.
    """

    estimator = ("d_it = exp(x_it) − x_it − 1", f"min(d_it, {MAX_K3:g})")
    sources = ("GRPO, DeepSeekMath (arXiv 2402.03300), equation 4", BOUND)

    def estimate(self, x_BT: Tensor) -> Tensor:
        return _k3(x_BT).clamp(max=MAX_K3)

    def clamped(self, logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
        return _k3(ref_logp_BT - logp_BT) > MAX_K3


def _k3(x_BT: Tensor) -> Tensor:
    x_BT = x_BT.clamp(-FARTHEST, FARTHEST)
    return x_BT.exp() - x_BT - 1
