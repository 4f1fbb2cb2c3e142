"""Scoring that does not wait for the slowest completion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from grpocli.data import Completion, Rollout
    from grpocli.rewards.reward import Score
    from grpocli.rewards.scoring import Scorer

Scored = tuple[list["Rollout"], list[dict[str, "Score"]]]


class Early:
    """Groups as they come: decoded, and scored by the rewards that compute in processes of their own.

    rollouts_of: of the k-th request's completions. lock: held while a reward is called. One thread does it, group by
    group, so that the result does not depend on when they come. Leaving the block waits for what was taken, or after
    an error for no more than what is under way.
    """

    def __init__(
        self,
        scorer: Scorer,
        max_tokens: int,
        rollouts_of: Callable[[int, Sequence[Completion]], list[Rollout]],
        lock: threading.Lock,
    ) -> None:
        self.scorer, self.max_tokens, self.rollouts_of, self.lock = scorer, max_tokens, rollouts_of, lock
        self._thread = ThreadPoolExecutor(1, "rewards")
        self._groups: dict[int, Future[Scored]] = {}

    def take(self, k: int, completions: Sequence[Completion]) -> None:
        """All completions of the k-th request are there. Returns at once."""
        self._groups[k] = self._thread.submit(self._score, k, completions)

    def _score(self, k: int, completions: Sequence[Completion]) -> Scored:
        rollouts = self.rollouts_of(k, completions)
        with self.lock:
            return rollouts, self.scorer.early(rollouts, self.max_tokens)

    def group(self, k: int, completions: Sequence[Completion]) -> Scored:
        """Rollouts of the k-th request, and the scores by name that each has already."""
        if k in self._groups:
            return self._groups[k].result()
        return self.rollouts_of(k, completions), [{} for _ in completions]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=kind is not None)
