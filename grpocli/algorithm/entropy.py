"""What the entropies of tokens are for: a bonus, subtracted from the loss of each token, and the choice of tokens.

The choice limits the policy-gradient term. KL, entropy bonus and denominators include all tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpocli.config.parts import part, require

if TYPE_CHECKING:
    from torch import Tensor


@part("algorithm/entropy", "none")
class NoEntropy:
    """No entropy bonus."""

    coefficient = 0.0

    def __call__(self, entropy_BT: Tensor) -> Tensor:
        return entropy_BT.new_zeros(())


@part("algorithm/entropy", "bonus")
class EntropyBonus:
    """coefficient x H_it, the entropy in nats of the distribution that token t was drawn from (arXiv 1602.01783)."""

    coefficient: float = 0.001
    """Weight in the loss; 0: no bonus."""

    def __post_init__(self) -> None:
        require(self, "coefficient", 0 <= self.coefficient < math.inf, "must be a finite number of 0 or more")

    def __call__(self, entropy_BT: Tensor) -> Tensor:
        return self.coefficient * entropy_BT


@part("algorithm/tokens", "all")
class AllTokens:
    """Select every token in the loss."""

    needs_entropy = False


@part("algorithm/tokens", "top_entropy")
class TopEntropy:
    """Select the fraction `quantile` of tokens with the highest entropy in the optimizer window: H_it >= tau.

    "Beyond the 80/20 Rule" (arXiv 2506.01939), equation 6, where the fraction is 0.2. Entropies are computed before
    the step's first update, so tau does not depend on the micro-batch split.
    """

    quantile: float = 0.2
    """Fraction of the tokens that is selected, above 0 and at most 1 (every token)."""
    needs_entropy = True

    def __post_init__(self) -> None:
        require(self, "quantile", 0 < self.quantile <= 1, "must be above 0 and at most 1 (every token)")

    def threshold(self, entropy_N: Tensor) -> Tensor:
        """tau, a scalar in nats: the (1 - quantile) quantile, linear between two tokens' values.

        entropy_N: of all tokens in the loss of the window.
        """
        if not len(entropy_N):
            return entropy_N.new_zeros(())
        sorted_N = entropy_N.sort().values  # torch.quantile refuses more than 2^24 values
        position = (1 - self.quantile) * (len(sorted_N) - 1)
        below = int(position)
        above = min(below + 1, len(sorted_N) - 1)
        return sorted_N[below].lerp(sorted_N[above], position - below)

    def __call__(self, entropy_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """The selected tokens [B, T] (bool) of the rows of a whole window."""
        return (entropy_BT >= self.threshold(entropy_BT[mask_BT.bool()])) & mask_BT.bool()
