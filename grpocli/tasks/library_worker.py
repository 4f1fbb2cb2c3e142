"""Data that an environment's library makes, in a worker process: the trainer does not import the environment's code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpocli.errors import ConfigError
from grpocli.rewards.reward import Failure
from grpocli.rewards.worker_pool import WorkerPool

LARGEST_SHARE = 5
"""At most one example of this number is held out for evaluation."""


def call_in_worker(
    function: str, arguments: Sequence[Any], seconds: float, variables: Sequence[str], key: str, value: str, doing: str
) -> list[Any]:
    """The list that `module:function` returns. Raises ConfigError if it fails; `doing` says at what.

    seconds: deadline. variables: names of the environment variables that the function needs.
    """
    pool = WorkerPool(function, 1, seconds, variables)
    try:
        (found,) = pool.map([list(arguments)])
    finally:
        pool.close()
    if isinstance(found, Failure):
        raise ConfigError(f"cannot {doing}: {' '.join(found.reason.split())}", key=key, value=value)
    result: list[Any] = found
    return result


def number_held_out(n: int, most: int) -> int:
    """How many of n examples are for evaluation: at least one, at most `most` and a fifth."""
    return min(most, max(n // LARGEST_SHARE, 1))
