"""The order in which a run draws its examples: a function of the seed and a counter, so nothing else is saved."""

from __future__ import annotations

import numpy as np


class Order:
    """Every one of n examples once an epoch, in another order each epoch."""

    def __init__(self, n: int, seed: int) -> None:
        """n >= 1 examples, seed >= 0."""
        self.n, self.seed = n, seed
        self._epoch, self._permutation = -1, np.arange(0)

    def index(self, draw: int) -> int:
        """Which of the n examples the draw-th one (from 0) is."""
        epoch, place = divmod(draw, self.n)
        if epoch != self._epoch:
            # raw bits are the part of numpy's generators that stays the same between its versions
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
            self._epoch, self._permutation = epoch, np.argsort(bits, kind="stable")
        return int(self._permutation[place])

    def uid(self, draw: int) -> str:
        """`EPOCH-INDEX`: a name that no other draw has."""
        return f"{draw // self.n}-{self.index(draw)}"
