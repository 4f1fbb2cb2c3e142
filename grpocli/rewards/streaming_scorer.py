"""Scoring that does not wait for the slowest completion."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from grpocli.rewards.reward import Score
    from grpocli.rewards.scoring import Scorer
    from grpocli.types import Completion, Rollout

Scored = tuple[list["Rollout"], list[dict[str, "Score"]]]


class EarlyScorer:
    """Groups as they come: decoded, and scored by the rewards that compute in processes of their own.

    rollouts_of: of the k-th request's completions. lock: held while a reward is called. One thread does it, each time
    with all groups that have come meanwhile. Leaving the block waits for what was taken, but not after an error.
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
        self._calls: list[Future[None]] = []
        self._waiting: deque[tuple[int, Sequence[Completion]]] = deque()
        self._done: dict[int, Scored] = {}
        self._over = False

    def take(self, k: int, completions: Sequence[Completion]) -> None:
        """All completions of the k-th request are there. Returns at once."""
        self._waiting.append((k, completions))
        self._calls.append(self._thread.submit(self._score))

    def _score(self) -> None:
        """What waits, all at once; nothing where the call before has taken it."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        groups = [(k, self.rollouts_of(k, completions)) for k, completions in waiting]
        with self.lock:
            if self._over:  # nobody will ask, and the rewards are being closed
                return
            scores = iter(self.scorer.early([one for _, rollouts in groups for one in rollouts], self.max_tokens))
        for k, rollouts in groups:
            self._done[k] = rollouts, [next(scores) for _ in rollouts]

    def group(self, k: int, completions: Sequence[Completion]) -> Scored:
        """Rollouts of the k-th request, and the scores by name that each has already. After the block."""
        if k in self._done:
            return self._done[k]
        return self.rollouts_of(k, completions), [{} for _ in completions]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = kind is not None
        self._thread.shutdown(wait=kind is None, cancel_futures=kind is not None)
        if kind is None:
            for call in self._calls:
                call.result()  # raises what it raised
