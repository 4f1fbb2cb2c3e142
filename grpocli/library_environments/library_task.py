"""What environments of libraries share: keys of their tasks, the split, work in a worker process and in an event loop.

The trainer does not import an environment's code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from grpocli.config.parts import one_of, require
from grpocli.errors import ConfigError
from grpocli.rewards.worker_pool import FULL_TIMEOUTS, REDUCED
from grpocli.tasks.task import BaseTask

T = TypeVar("T")

LARGEST_SHARE = 5
"""At most one example of this number is held out for evaluation."""


@dataclass(frozen=True)
class LibraryTask(BaseTask):
    """Keys of tasks whose examples and episodes are a library's."""

    format: str = "chat"
    """`chat`: messages for the chat template; `plain`: the text of a single user message."""
    train_size: int = 1000
    """Most examples to train on: those after the ones to evaluate on."""
    eval_size: int = 100
    """Most examples to evaluate on: the first ones, at most a fifth of all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "format", ("chat", "plain"))
        require(self, "train_size", self.train_size >= 1, "must be at least 1")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")

    @property
    def wanted(self) -> int:
        """How many examples a library is asked for, so that those held out do not depend on train_size."""
        return max(self.eval_size + self.train_size, LARGEST_SHARE * self.eval_size)

    def rows_of(self, split: str, n: int, key: str, value: str, hint: str = "") -> range:
        """The numbers of the examples of a split. Raises ConfigError, naming the key, if there are none.

        n: how many examples there are, counted up to `wanted`.
        """
        held_out = min(self.eval_size, max(n // LARGEST_SHARE, 1))
        rows = range(held_out) if split == "eval" else range(held_out, min(n, held_out + self.train_size))
        if not rows:
            raise ConfigError(f"has {n} examples, too few for {split}", key=key, value=value, hint=hint)
        return rows


class BackgroundLoop:
    """Runs asynchronous functions in a thread that ends with the process.

    seconds: deadline of each; a tenth of it after FULL_TIMEOUTS were missed in a row, so that a library that hangs does
    not hold up a run for as long as all of its episodes together.
    """

    def __init__(self, seconds: float) -> None:
        self.loop, self.seconds, self._missed = asyncio.new_event_loop(), seconds, 0
        threading.Thread(target=self.loop.run_forever, name="environment", daemon=True).start()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, called in the loop. Raises TimeoutError after the deadline, which cancels it."""
        return asyncio.run_coroutine_threadsafe(self._limited(work), self.loop).result()

    async def _limited(self, work: Callable[[], Awaitable[T]]) -> T:
        seconds = self.seconds * (REDUCED if self._missed >= FULL_TIMEOUTS else 1.0)
        try:
            result = await asyncio.wait_for(work(), seconds)
        except TimeoutError:
            self._missed += 1
            raise TimeoutError(f"it took longer than {seconds:g} s") from None
        self._missed = 0
        return result
