"""A deadline for a call that stays in its own thread, so that code that uses `signal.alarm` works inside it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError(what) in the block when it takes longer; blocking system calls are interrupted too.

    Uses SIGUSR2. Outside of the main thread, where Python handles no signals, there is no deadline.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main or main.ident is None:
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(what)

    before = signal.signal(signal.SIGUSR2, give_up)
    timer = threading.Timer(seconds, signal.pthread_kill, (main.ident, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a signal that is on its way must find our handler
        signal.signal(signal.SIGUSR2, before)
