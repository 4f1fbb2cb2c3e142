"""No orphans: a tiny process between us and a command, which ends the command's whole process tree with us.

    with guarded([sys.executable, "-m", "server"], name="server") as process:
        ...

The guard runs in its own session and holds the read end of a pipe whose write end only we hold. However we end,
SIGKILL included, the kernel closes our end; the guard then ends everything that the command started (TERM, a
grace period, KILL), deletes the files it was told to, and goes. Run as a script (`reaper.py`) it needs the
standard library alone, so it starts in some 20 ms.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("reaper.py")
KILL_WAIT = 10.0  # seconds in which the kernel surely ends a process that got SIGKILL


class Guarded:
    """A running command and its guard. `returncode` is None while it runs, 128 + n where signal n ended it."""

    def __init__(self, process: subprocess.Popen[bytes], line: int, name: str) -> None:
        self._process, self._line, self.name = process, line, name

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int:
        """The guard's."""
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The return code; raises subprocess.TimeoutExpired after `timeout` seconds."""
        return self._process.wait(timeout)

    def terminate(self) -> None:
        """Ask the command to end (SIGTERM to its process group), and do not wait."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace: float = 10.0) -> int:
        """End the command and all it started: TERM, `grace` seconds, KILL. Safe to call twice."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self._hang_up()
        return self._process.wait(KILL_WAIT + grace)

    def _hang_up(self) -> None:
        if self._line >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._line, b"K")
            os.close(self._line)
            self._line = -1


@contextlib.contextmanager
def guarded(
    command: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    cwd: Path | None = None,
    grace: float = 10.0,
    remove: Sequence[Path | str] = (),
    hold: Sequence[int] = (),
) -> Iterator[Guarded]:
    """Run `command` so that it cannot outlive this process; leaving the block stops it.

    name: what it is called in the process list. env: its whole environment (None: ours). log: where its output is
    appended (None: ours). grace: seconds between TERM and KILL. remove: files and folders deleted when it has
    ended, even if we did not live to see that; a text is a pattern of paths. hold: descriptors of locks that the guard
    keeps open and the command does not inherit. Raises FileNotFoundError if the program does not exist.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]}")
    read, write = os.pipe()
    try:
        process = _start(command, read, name, env, log, cwd, grace, remove, hold)
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)
    running = Guarded(process, write, name)
    try:
        yield running
    finally:
        running.stop(grace)


def _start(
    command: Sequence[str],
    line: int,
    name: str,
    env: Mapping[str, str] | None,
    log: Path | None,
    cwd: Path | None,
    grace: float,
    remove: Sequence[Path | str],
    hold: Sequence[int],
) -> subprocess.Popen[bytes]:
    orders = {
        "parent": os.getpid(),
        "line": line,
        "grace": grace,
        "remove": [glob.escape(str(one.absolute())) if isinstance(one, Path) else one for one in remove],
        "hold": list(hold),
    }
    arguments = [sys.executable, "-I", "-S", str(GUARD), name, json.dumps(orders), *command]
    with contextlib.ExitStack() as stack:
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            arguments,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=(line, *hold),
            start_new_session=True,  # a Ctrl-C in the terminal reaches us; we decide what becomes of the command
        )


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(pids: Sequence[int], timeout: float) -> list[int]:
    """Those of `pids` that still run after at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
