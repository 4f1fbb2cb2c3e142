"""The end of a process that has run user code."""

from __future__ import annotations

import os
import sys
import threading
import time

GRACE = 5.0
"""Seconds that threads have to end after the main thread."""


def leave_threads(code: int) -> None:
    """Call this right before the process ends: Python then waits at most GRACE seconds for other threads.

    After that the process ends with exit code `code`, without running exit handlers.
    """
    if _awaited():
        threading.Thread(target=_leave, args=(code,), name="leaving", daemon=True).start()


def _leave(code: int) -> None:
    time.sleep(GRACE)  # not after a join of the main thread: Python waits for executors before it ends that one
    names = ", ".join(thread.name for thread in _awaited())
    if not names:  # exit handlers are running
        return
    problem = "started in this process did not end, and was left behind; make it a daemon, or join it"
    print(f"grpocli: a thread ({names}) that code of yours {problem}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _awaited() -> list[threading.Thread]:
    """The threads that Python waits for when it ends."""
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
