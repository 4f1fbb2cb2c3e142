"""The guard: a small process that ends a command and everything it started when this process ends.

    with guarded([sys.executable, "-m", "server"], name="server") as process:
        ...

The guard (`reaper.py`) runs in its own session and holds the read end of a pipe; only this process holds the write end.
When this process ends, even by SIGKILL, the kernel closes the write end. The guard then ends the command's process tree
(SIGTERM, a grace period, SIGKILL), deletes given files, and exits. It imports only the standard library, so it starts
in about 20 ms.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpocli.processes import reaper
from grpocli.processes.reaper import KILL_NOW, KILL_WAIT


class Guarded:
    """A command with its guard."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: int, name: str) -> None:
        self._process, self._pipe, self.name = process, pipe, name

    @property
    def pid(self) -> int:
        """The pid of the guard."""
        return self._process.pid

    def poll(self) -> int | None:
        """The return code: None while the command runs, and 128 + n if signal n ended it."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The return code; raises subprocess.TimeoutExpired after `timeout` seconds."""
        return self._process.wait(timeout)

    def terminate(self) -> None:
        """Send SIGTERM to the command's process group, without waiting."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace: float = 10.0) -> int:
        """End the command and everything it started: SIGTERM, `grace` seconds, SIGKILL. Safe to call twice."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):  # the guard has ended
                os.write(self._pipe, KILL_NOW)
            os.close(self._pipe)
            self._pipe = -1
        return self._process.wait(KILL_WAIT + grace)


@contextlib.contextmanager
def guarded(
    command: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    grace: float = 10.0,
    remove: Sequence[Path | str] = (),
    hold: Sequence[int] = (),
) -> Iterator[Guarded]:
    """Run `command` so that it cannot outlive this process. Leaving the block stops it.

    name: the guard's name in the process list. env: the whole environment (None: this process's). log: the file to
    which output is appended (None: this process's output). grace: seconds between SIGTERM and SIGKILL. remove: files
    and folders that the guard deletes at the end; a text is a glob pattern. hold: descriptors of locks that the guard
    keeps open and the command does not inherit. Raises FileNotFoundError if the program does not exist.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]}")
    read, write = os.pipe()
    orders = {
        "parent": os.getpid(),
        "pipe": read,
        "grace": grace,
        "remove": [glob.escape(str(one.absolute())) if isinstance(one, Path) else one for one in remove],
        "hold": list(hold),
    }
    try:
        process = _start([name, json.dumps(orders), *command], (read, *hold), env, log)
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
    arguments: list[str],
    descriptors: tuple[int, ...],
    env: Mapping[str, str] | None,
    log: Path | None,
) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, *arguments],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C does not reach the command: this process decides
        )


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
