"""Importance weights of tokens, for the gap between the sampler's and the trainer's probabilities.

x = pi_old / mu. The trainer computes pi_old, the policy at the start of the step; the sampler computes mu, the policy
that sampled. They differ by rounding and by staleness. A correction weighs tokens by x and drops those whose x is far
from 1: its weight rho [B, T] multiplies the policy-gradient term and has no gradient. Sources: NeMo RL's GRPO guide;
"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (fengyao.notion.site, 2025).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpocli.algorithm.objective import log_ratio
from grpocli.config.parts import interpolate, one_of, part, require, section

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = ("none", "token", "sequence")


@part("algorithm/correction", "none")
class NoCorrection:
    """No correction: every token has weight 1."""

    corrects = False

    def __call__(self, old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return old_logp_BT.new_ones(())


@part("algorithm/correction", "sampler")
class SamplerAsOld(NoCorrection):
    """The old policy is the sampler, pi_old = mu for every token, so no correction is left to make.

    The objective then bounds rounding and staleness together with the updates of a step, and no update scores its
    completions beforehand. Default of prime-rl; `bypass_mode` of verl, `--use-rollout-logprobs` of slime.
    """

    takes_sampler_as_old = True


@part("algorithm/correction", "importance")
class Importance:
    """A weight by x = pi_old / mu (trainer / sampler), and a filter by x, each of tokens or of sequences.

    x of a sequence is the geometric mean of its tokens' x. TIS: weigh=token. MIS, IcePop with a clamp: weigh=token
    drop=token. NeMo RL's seq-mask-tis: weigh=token drop=sequence. Only a filter: weigh=none.
    """

    weigh: str = "token"
    """Whose x is the weight, clamped to `min` and `max`: that of the `token` or the `sequence`; `none`: the weight is
    1."""
    min: float = 0.0
    """Lower bound of the weight, at least 0."""
    max: float = 2.0
    """Upper bound of the weight; inf: none."""
    drop: str = "none"
    """Whose x must be between `low` and `high`, so that the weight is not 0: that of the `token` or the `sequence`;
    `none`: nothing is dropped."""
    low: float = 0.5
    """Lower bound of the filter, 0 to 1."""
    high: float = 2.0
    """Upper bound of the filter, at least 1; inf: none."""

    def __post_init__(self) -> None:
        one_of(self, "weigh", LEVELS)
        one_of(self, "drop", LEVELS)
        require(self, "max", self.max > 0, "must be above 0, since no token weighs anything otherwise; inf: no bound")
        require(self, "min", 0 <= self.min <= self.max, "must be between 0 and algorithm.correction.max")
        require(self, "min", self.min < math.inf, "must be a finite number")
        require(self, "low", 0 <= self.low <= 1, "must be between 0 and 1, the ratio of a token that agrees")
        require(self, "high", self.high >= 1, "must be 1 or more, the ratio of a token that agrees; inf: no bound")

    def __call__(self, old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        weight = old_logp_BT.new_ones(())
        if self.weigh != "none":
            weight = log_ratio(old_logp_BT, rollout_logp_BT, mask_BT, self.weigh).exp().clamp(self.min, self.max)
        if self.drop != "none":
            ratio = log_ratio(old_logp_BT, rollout_logp_BT, mask_BT, self.drop).exp()
            weight = weight.where((ratio >= self.low) & (ratio <= self.high), 0.0)
        return weight.detach()


@section("algorithm.correction")
class Preset:
    """Base of the named settings of `importance`, which have two bounds."""

    min: float = 0.0
    """Lower bound of rho, at least 0."""
    max: float = 2.0
    """Upper bound of rho."""
    level = "token"
    drops = False

    def __post_init__(self) -> None:
        if self.drops:
            require(self, "max", self.max >= 1, "must be 1 or more, the ratio of a token that agrees; inf: no bound")
            require(self, "min", 0 <= self.min <= 1, "must be between 0 and 1, the ratio of a token that agrees")
        _ = self.importance  # which checks the bounds of a weight

    @property
    def importance(self) -> Importance:
        """The setting: the ratio as a weight, clamped to the bounds or dropped outside of them."""
        if self.drops:
            return Importance(self.level, max=math.inf, drop=self.level, low=self.min, high=self.max)
        return Importance(self.level, self.min, self.max)

    def __call__(self, old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return self.importance(old_logp_BT, rollout_logp_BT, mask_BT)


@part("algorithm/correction", "token_truncate")
class TokenTruncate(Preset):
    """A weight per token: clamp(rho, min, max), rho = pi_old / mu (trainer / sampler).

    `importance` with weigh=token drop=none. TRL's mode of the same name, verl's and slime's TIS.
    """


@part("algorithm/correction", "auto")
class AutoCorrection:
    """`token_truncate` if completions may be stale (`max_staleness` above 0), else `none`.

    Choose a correction by name to set its bounds.
    """

    max_staleness: int | None = interpolate("rollout.max_staleness")
    """Maximum staleness of a completion, in weight versions; 0 disables the correction."""

    @property
    def chosen(self) -> NoCorrection | TokenTruncate:
        return TokenTruncate() if self.corrects else NoCorrection()

    @property
    def corrects(self) -> bool:
        return bool(self.max_staleness)

    def __call__(self, old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return self.chosen(old_logp_BT, rollout_logp_BT, mask_BT)


@part("algorithm/correction", "token_mask")
class TokenMask(Preset):
    """A weight per token: rho = pi_old / mu (trainer / sampler), set to 0 outside [min, max].

    `importance` with weigh=token max=inf and drop=token. NeMo RL's icepop, TRL's mode of the same name.
    """

    drops = True


@part("algorithm/correction", "sequence_truncate")
class SequenceTruncate(TokenTruncate):
    """Like token_truncate, with one rho per sequence: the geometric mean of its tokens' rho.

    TRL's mode of the same name, and verl's `rollout_is: sequence`, take the product, which is near 0 or at the bound
    for a long completion.
    """

    level = "sequence"


@part("algorithm/correction", "sequence_mask")
class SequenceMask(TokenMask):
    """Like token_mask, with one rho per sequence: the geometric mean of its tokens' rho.

    TRL's mode of the same name takes the product. NeMo RL's seq-mask-tis drops by the geometric mean, too, but weighs
    each token by its own rho: `importance` with weigh=token drop=sequence.
    """

    level = "sequence"
