"""The end of a process in which code of the user's has run."""

from __future__ import annotations

import os
import sys
import threading
import time

GRACE = 5.0
"""Seconds that threads have to end when everything else is done."""


def leave_threads(code: int) -> None:
    """Once Python ends, with exit code `code`, wait GRACE seconds for its threads and no longer."""
    if _others():
        threading.Thread(target=_leave, args=(code,), name="leaving", daemon=True).start()


def _leave(code: int) -> None:
    threading.main_thread().join()
    time.sleep(GRACE)
    names = ", ".join(thread.name for thread in _others())
    problem = "started in this process did not end, and was left behind; make it a daemon, or join it"
    print(f"grpocli: a thread ({names}) that code of yours {problem}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _others() -> list[threading.Thread]:
    """Those that Python waits for."""
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
