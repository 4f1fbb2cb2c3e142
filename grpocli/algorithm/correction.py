"""Importance weights of tokens, for the gap between the sampler's and the trainer's probabilities.

rho = pi_old / mu. The trainer computes pi_old, the policy at the start of the step; the sampler computes mu, the policy
that sampled. They differ by rounding and by staleness. The weight [B, T] multiplies the policy-gradient term and has no
gradient. Sources: NeMo RL's GRPO guide; "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(fengyao.notion.site, 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from grpocli.algorithm.objective import log_ratio
from grpocli.config.formula import Formula
from grpocli.config.parts import interpolate, part, require, section

if TYPE_CHECKING:
    from torch import Tensor

SOURCES = (
    "NeMo RL's GRPO guide",
    '"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (fengyao.notion.site, 2025)',
)


@part("algorithm/correction", "none")
class NoCorrection:
    """No correction: every token has weight 1."""

    corrects = False

    def __call__(self, old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return old_logp_BT.new_ones(())

    def formula(self) -> Formula:
        return Formula(note="every token weighs 1")


@section("algorithm.correction")
class Correction:
    """Base of the corrections, which bound rho."""

    min: float = 0.0
    """Lower bound of rho, at least 0."""
    max: float = 2.0
    """Upper bound of rho."""
    level = "token"
    corrects = True

    def __post_init__(self) -> None:
        require(self, "min", 0 <= self.min <= self.max, "must be between 0 and algorithm.correction.max")

    def __call__(self, old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        ratio = log_ratio(old_logp_BT, rollout_logp_BT, mask_BT, self.level).exp()
        return self.bound(ratio).detach()

    def bound(self, ratio: Tensor) -> Tensor:
        raise NotImplementedError

    def formula(self) -> Formula:
        sequence = self.level == "sequence"
        x = "x_i" if sequence else "x_it"
        ratio = "x_i = ( Π_t π_old(o_it) / μ(o_it) )^(1 / |o_i|)" if sequence else "x_it = π_old(o_it) / μ(o_it)"
        return Formula(
            (ratio, f"ρ_it = {self.bounded(x)}"),
            {"ρ_min": "min", "ρ_max": "max"},
            SOURCES,
            "μ: as the sampler computes it; π_old: as the trainer does. ρ has no gradient.",
        )

    def bounded(self, x: str) -> str:
        """The formula of `bound`."""
        raise NotImplementedError


@part("algorithm/correction", "token_truncate")
class TokenTruncate(Correction):
    """A weight per token: clamp(rho, min, max), rho = pi_old / mu (trainer / sampler)."""

    def bound(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(self.min, self.max)

    def bounded(self, x: str) -> str:
        return f"clip({x}, ρ_min, ρ_max)"


@part("algorithm/correction", "auto")
class AutoCorrection:
    """`token_truncate` if completions may be stale (`max_staleness` above 0), else `none`.

    Choose a correction by name to set its bounds.
    """

    max_staleness: int | None = interpolate("rollout.max_staleness")
    """Maximum staleness of a completion, in weight versions; 0 disables the correction."""

    @property
    def chosen(self) -> NoCorrection | TokenTruncate:
        return TokenTruncate() if self.max_staleness else NoCorrection()

    @property
    def corrects(self) -> bool:
        return self.chosen.corrects

    def __call__(self, old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return self.chosen(old_logp_BT, rollout_logp_BT, mask_BT)

    def formula(self) -> Formula:
        chosen, formula = self.chosen, self.chosen.formula()
        if isinstance(chosen, NoCorrection):
            return replace(formula, note=f"{formula.note}: rollout.max_staleness is 0")
        ratio, bounded = formula.lines
        bounded = bounded.replace("ρ_min", f"{chosen.min:g}").replace("ρ_max", f"{chosen.max:g}")
        note = f"token_truncate, for staleness. {formula.note}"
        return replace(formula, lines=(ratio, bounded), symbols={}, note=note)


@part("algorithm/correction", "token_mask")
class TokenMask(Correction):
    """A weight per token: rho = pi_old / mu (trainer / sampler), set to 0 outside [min, max]."""

    def bound(self, ratio: Tensor) -> Tensor:
        return ratio.masked_fill((ratio < self.min) | (ratio > self.max), 0.0)

    def bounded(self, x: str) -> str:
        return f"{x} where ρ_min ≤ {x} ≤ ρ_max, else 0"


@part("algorithm/correction", "sequence_truncate")
class SequenceTruncate(TokenTruncate):
    """Like token_truncate, with one rho per sequence: the geometric mean of its tokens' rho."""

    level = "sequence"


@part("algorithm/correction", "sequence_mask")
class SequenceMask(TokenMask):
    """Like token_mask, with one rho per sequence: the geometric mean of its tokens' rho."""

    level = "sequence"
