"""An event loop in a thread, for environments of libraries that are asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs asynchronous functions in a thread that ends with the process. seconds: deadline of each."""

    def __init__(self, seconds: float) -> None:
        self.loop, self.seconds = asyncio.new_event_loop(), seconds
        threading.Thread(target=self.loop.run_forever, name="environment", daemon=True).start()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, called in the loop. Raises TimeoutError after the deadline, which cancels it."""
        return asyncio.run_coroutine_threadsafe(self._limited(work), self.loop).result()

    async def _limited(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await asyncio.wait_for(work(), self.seconds)
        except TimeoutError:
            raise TimeoutError(f"it took longer than {self.seconds:g} s") from None
