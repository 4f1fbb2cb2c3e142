"""Entropy bonuses, subtracted from the loss of each token."""

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
