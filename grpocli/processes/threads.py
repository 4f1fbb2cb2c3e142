"""Threads: work in the background, and the end of a process, which threads of user code may delay only so long."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from os import _exit as leave  # bound before user code runs, during which `os._exit` is replaced
from typing import NoReturn, TypeVar

from grpocli.processes.signals import handle_stops

T = TypeVar("T")

GRACE = 5.0
"""Seconds that threads may continue after the main thread, and a user's process after its input has ended."""


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a daemon thread, which the end of the process does not wait for, as it does for executors'."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, so the thread may set it
    threading.Thread(target=fulfil, args=(future, work), name=name, daemon=True).start()
    return future


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Give the future the result of the work, or its error."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
        future.set_exception(error)


def end_process(code: int) -> NoReturn:
    """Wait for the threads and the exit handlers of this process, and end it with `code`.

    Threads get GRACE seconds. Ctrl-C ends it at once, other signals no longer do.
    Without Python's finalization, which takes seconds once torch is loaded, and aborts while a thread runs C++ code.
    """
    if signal.SIGINT in handle_stops(signal.SIG_IGN):
        signal.signal(signal.SIGINT, lambda *_: leave(code))
    threading.Thread(target=_exit_late, args=(code,), name="exit timer", daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does: joins threads, ends those of executors
    atexit._run_exitfuncs()
    _leave(code)


def _exit_late(code: int) -> None:
    time.sleep(GRACE)  # instead of joining the main thread, which ends only after Python has joined the executors
    left = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    if left:
        thread = f"a thread ({', '.join(left)}) that your code started in this process"
        _leave(code, f"grpocli: {thread} did not end, and was left behind; make it a daemon, or join it\n")


def _leave(code: int, last_words: str = "") -> NoReturn:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # user code may have closed the streams
        print(last_words, end="", file=sys.stderr, flush=True)
        sys.stdout.flush()
    leave(code)
