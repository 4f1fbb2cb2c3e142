"""The order in which a run draws examples and tasks: functions of the seed and a counter, without other state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GOLDEN = 2654435769
"""2**32 divided by the golden ratio: its multiples, modulo 2**32, are spread evenly."""


def permutation(n: int, *seed: int) -> NDArray[np.int64]:
    """The numbers below n, in an order that depends only on n and the seed."""
    # numpy guarantees the raw bits of a generator between versions, but not its permutations
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(bits, kind="stable")


class Order:
    """Draws each of n examples once per epoch, in a new order each time."""

    def __init__(self, n: int, seed: int, *streams: int) -> None:
        """n >= 1 examples, seed >= 0; streams: further numbers that the order depends on."""
        self.n, self.seed = n, (seed, *streams)
        self._epoch, self._permutation = -1, np.arange(0)

    def index(self, draw: int) -> int:
        """The index of the example for a draw, counted from 0."""
        epoch, place = divmod(draw, self.n)
        return int(self.epoch(epoch)[place])

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """The indices in the order of an epoch."""
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, permutation(self.n, *self.seed, epoch)
        return self._permutation


class FileOrder:
    """Draws n examples in the order of the data, epoch after epoch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def index(self, draw: int) -> int:
        """The index of the example for a draw, counted from 0."""
        return draw % self.n


class TaskScheduler:
    """Assigns draws to tasks in proportion to their weights.

    It uses a low-discrepancy sequence: in any run of draws each task has its share, to within a few draws.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.weights = list(weights)
        self._edges = np.cumsum(weights) / np.sum(weights)
        self._start = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._task, self._nth = np.empty(0, np.int64), np.empty(0, np.int64)

    def of(self, draw: int) -> tuple[int, int]:
        """The index of a draw's task, and the number of earlier draws of that task."""
        if draw >= len(self._task):
            self._count(max(2 * draw, 1024))
        return int(self._task[draw]), int(self._nth[draw])

    def drawn(self, draws: int) -> list[int]:
        """How many of the first `draws` draws each task has."""
        if draws > len(self._task):
            self._count(max(2 * draws, 1024))
        return [int(n) for n in np.bincount(self._task[:draws], minlength=len(self._edges))]

    def _count(self, draws: int) -> None:
        place = (np.arange(draws, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(self._start)) % np.uint64(2**32)
        self._task = np.searchsorted(self._edges[:-1], place / 2**32, side="right")
        self._nth = np.empty(draws, np.int64)
        for task in range(len(self._edges)):
            (own,) = np.nonzero(self._task == task)
            self._nth[own] = np.arange(len(own))
