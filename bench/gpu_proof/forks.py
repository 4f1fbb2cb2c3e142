"""Functions in forks of this process, which has imported torch and grpocli, and has not touched the GPU."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile

GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def child(call: Callable[[], object], out: int, err: int) -> int:
    """Start a fork that runs a call, and ends with it and with this process. Returns its pid.

    out, err: descriptors of files.
    """
    from grpocli.processes.reaper import ENDING, die_with_parent

    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()
        os.setpgid(0, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        call()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        print("" if isinstance(error.code, int | None) else error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (what it raises must not go on in the code that forked)
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def forked(call: Callable[[], object], seconds: float = 3600) -> tuple[int | None, str, str]:
    """Run a call in a fork: its exit code (None: killed after `seconds`), and what it wrote to stdout and stderr."""
    with TemporaryFile() as out, TemporaryFile() as err:
        pid, until, code = child(call, out.fileno(), err.fileno()), time.monotonic() + seconds, None
        while code is None and time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0.02)
        if code is None:
            os.kill(pid, signal.SIGKILL)  # not waited for: it may wait for the GPU's driver even then
        texts = (os.pread(file.fileno(), 2**30, 0).decode(errors="replace") for file in (out, err))
        return code, next(texts), next(texts)


class Guarded:
    """A call in a fork below a guard of its own, which ends everything that the call has started."""

    def __init__(self, call: Callable[[], object], log: int) -> None:
        from grpocli.processes import reaper

        read, self.pipe = os.pipe()
        parent, code = os.getpid(), 1
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                reaper.spawn = lambda command, pipe: child(call, log, log)
                code = reaper.Guard(parent, read, GRACE, [], []).run([])
            finally:
                os._exit(code if code >= 0 else 128 - code)
        os.close(read)

    def poll(self) -> int | None:
        """The exit code, 128 + n if signal n ended the call; None while something of it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None

    def end(self) -> None:
        """Have the guard end everything, without waiting for it."""
        with suppress(BrokenPipeError):
            os.write(self.pipe, b"E")
