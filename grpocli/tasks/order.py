"""Which task and which problem is drawn next: functions of the seed and of the draw's number alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from grpocli.errors import ConfigError

Indices: TypeAlias = NDArray[np.int64]
GOLDEN = 2654435769
"""2**32 divided by the golden ratio: its multiples, modulo 2**32, are spread evenly."""


def permutation(n: int, *seed: int) -> Indices:
    """The numbers below n, in an order that depends only on n and the seed."""
    # numpy guarantees the raw bits of a generator between versions, but not its permutations
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(bits, kind="stable")


def problem_order(n: int, order: str, difficulty: NDArray[np.float64] | None, *seed: int) -> Indices:
    """The order in which an epoch draws n problems, for a `task.order`.

    difficulty: of each problem, for `difficulty`; equally hard ones are in the shuffled order.
    """
    if order == "file":
        return np.arange(n)
    shuffled = permutation(n, *seed)
    return shuffled if difficulty is None else shuffled[np.argsort(difficulty[shuffled], kind="stable")]


def difficulty_of(values: Sequence[Any], column: str, where: Callable[[int], str]) -> NDArray[np.float64]:
    """The difficulty of problems by the values of a column, which falls with them if the column has a leading `-`.

    Numbers, also as text, are compared as numbers; otherwise all are compared as text. where: names a problem in
    errors. Raises ConfigError for a missing value.
    """
    for i, value in enumerate(values):
        if not isinstance(value, str | int | float) or value == "" or value != value:
            problem = f"{where(i)} has {value!r:.60} there; every row needs a number, or every row a text"
            raise ConfigError(problem, key="task.difficulty_column", value=column)
    sign = -1.0 if column.startswith("-") else 1.0
    with suppress(ValueError):
        numbers = [float(value) for value in values]
        if not any(map(math.isnan, numbers)):
            return sign * np.array(numbers, np.float64)
    _, ranks = np.unique([str(value) for value in values], return_inverse=True)
    return sign * ranks.astype(np.float64)


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
            self._assign(max(2 * draw + 2, 1024))
        return int(self._task[draw]), int(self._nth[draw])

    def _assign(self, draws: int) -> None:
        """Compute the tasks of the first `draws` draws."""
        place = (np.arange(draws, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(self._start)) % np.uint64(2**32)
        self._task = np.searchsorted(self._edges[:-1], place / 2**32, side="right")
        self._nth = np.empty(draws, np.int64)
        for task in range(len(self._edges)):
            (own,) = np.nonzero(self._task == task)
            self._nth[own] = np.arange(len(own))
