"""The end of a process that has run user code."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from os import _exit as leave  # before code of the user's runs, during which the other name refuses

GRACE = 5.0
"""Seconds that threads have to end after the main thread."""
EXIT_GRACE = 120.0
"""Seconds more for exit handlers, which may be sending the last metrics to a dashboard."""


def leave_threads(code: int) -> None:
    """Call this right before the process ends, with its exit code.

    Python then waits at most GRACE seconds for other threads, and EXIT_GRACE more for exit handlers.
    """
    threading.Thread(target=_leave, args=(code,), name="leaving", daemon=True).start()


def _leave(code: int) -> None:
    time.sleep(GRACE)  # not after a join of the main thread: Python waits for executors before it ends that one
    if names := ", ".join(thread.name for thread in _awaited()):
        problem = f"a thread ({names}) that code of yours started in this process did not end, and was left behind"
        remedy = "make it a daemon, or join it"
    else:
        time.sleep(EXIT_GRACE)
        problem = f"an exit handler did not end within {GRACE + EXIT_GRACE:g} s, and was left behind"
        remedy = "look for atexit.register in code of yours"
    with contextlib.suppress(AttributeError, OSError, ValueError):  # of streams that code of the user's has closed
        print(f"grpocli: {problem}; {remedy}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    leave(code)


def _awaited() -> list[threading.Thread]:
    """The threads that Python waits for when it ends."""
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
