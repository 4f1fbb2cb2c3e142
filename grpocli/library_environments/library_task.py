"""What environments of libraries share: keys of their tasks, the split, work in a worker process and in an event loop.

The trainer does not import an environment's code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, TypeVar

from grpocli.config.parts import one_of, require
from grpocli.errors import ConfigError
from grpocli.processes.threads import run_in_thread
from grpocli.tasks.task import BaseTask

T = TypeVar("T")

LARGEST_SHARE = 5
"""At most one example of this number is held out for evaluation."""


@dataclass(frozen=True)
class LibraryTask(BaseTask):
    """Keys of tasks whose examples and episodes are a library's."""

    library: ClassVar[str]
    """The module of the library, which is also the task's name."""
    needs: ClassVar[str]
    """What pip installs."""
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

    def check_ready(self) -> None:
        super().check_ready()
        if find_spec(self.library) is None:
            raise ConfigError(f"needs a library: pip install '{self.needs}'", key="task", value=self.library)

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
    """Runs asynchronous functions in a thread that ends with the process, each for at most `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.loop, self.seconds = asyncio.new_event_loop(), seconds
        run_in_thread(self.loop.run_forever, "environment")

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, called in the loop. Raises TimeoutError after the deadline, which cancels it."""

        async def limited() -> T:
            try:
                return await asyncio.wait_for(work(), self.seconds)
            except TimeoutError as error:
                raise TimeoutError(f"it took longer than {self.seconds:g} s") from error

        return asyncio.run_coroutine_threadsafe(limited(), self.loop).result()
