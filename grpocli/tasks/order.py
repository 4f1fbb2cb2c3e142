"""The order in which a run draws its examples: a function of the seed and a counter, so nothing else is saved."""

from __future__ import annotations

import numpy as np


class Order:
    """Every example once an epoch, in another order each epoch."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self._epoch, self._permutation = -1, np.arange(0)

    def index(self, draw: int) -> int:
        """Which of the n examples the draw-th one (from 0) is."""
        epoch, place = divmod(draw, self.n)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            self._epoch, self._permutation = epoch, generator.permutation(self.n)
        return int(self._permutation[place])
