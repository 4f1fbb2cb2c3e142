"""A deadline for a call, in the main thread without leaving it, so that code that uses `signal.alarm` works inside."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError(what) when it takes longer.

    Only the main thread can be interrupted: in another (`rollout.max_staleness` above 0) the call gets a thread of its
    own, which is left behind.
    """
    if threading.current_thread() is threading.main_thread():
        with deadline(seconds, what):
            return call()
    done: Future[T] = Future()
    threading.Thread(target=_into, args=(done, call), daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError as error:
        raise error if done.done() else TimeoutError(what) from error


def _into(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
        done.set_exception(error)


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
