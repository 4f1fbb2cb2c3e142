"""An event loop in a thread, for environments of libraries that are asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from grpocli.rewards.worker_pool import FULL_TIMEOUTS, REDUCED

T = TypeVar("T")


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
