"""Work in a thread returns its result or raises its error; the end of the process waits for threads only so long."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from grpocli.processes.threads import run_in_thread


def test_the_end_of_the_process_does_not_wait_for_a_thread() -> None:
    assert run_in_thread(lambda: threading.current_thread().daemon, "test").result(30)

    def fails() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run_in_thread(fails, "test").result(30)


LEAVING = """import atexit, sys, threading, time
from concurrent import futures
from grpocli.processes import threads as leaving
leaving.GRACE = 0.2
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "printed", "said"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), name='mine').start()", "", "grpocli: a thread (mine) that"),
        (
            "futures.ThreadPoolExecutor(1, thread_name_prefix='mine').submit(time.sleep, 600)",
            "",
            "grpocli: a thread (mine_0) that your code started in this process did not end",
        ),
        ("class Model:\n    def __del__(self): print('freed')\nmodel = Model()", "", ""),  # takes seconds with torch
        (
            "threading.Thread(target=time.sleep, args=(0.05,)).start()\natexit.register(lambda: print('handled'))",
            "handled\n",
            "",
        ),
    ],
    ids=["a thread that does not end", "an executor's", "objects are not freed", "handlers run"],
)
def test_a_process_ends(code: str, printed: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{LEAVING}{code}\nleaving.end_process(4)"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (4, printed)
    assert done.stderr.startswith(said)
    assert bool(done.stderr) is bool(said)
