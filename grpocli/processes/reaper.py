"""The guard process of `guard.py`, run as `reaper.py NAME ORDERS COMMAND...`. It uses only the standard library."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_DIED = signal.SIGUSR1  # not SIGTERM, since the kernel also sends it when only a thread of the parent ends
KILL_NOW = b"K"  # the parent's message that its grace period is over
LEFTOVER_GRACE = 2.0  # seconds for processes that a command leaves behind
TRACKER = b"multiprocessing.resource_tracker"  # in the command line of Python's resource trackers
KILL_WAIT = 10.0  # seconds within which the kernel ends a process after SIGKILL
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guard:
    """Runs a command, returns its exit code, and ends its process tree on request or when the parent dies."""

    def __init__(self, parent: int, pipe: int, grace: float, remove: list[str], hold: list[int]) -> None:
        self.parent, self.pipe, self.grace, self.remove = parent, pipe, grace, remove
        for descriptor in hold:
            os.set_inheritable(descriptor, False)  # not for the command
        self.child = 0
        self.status: int | None = None
        self.stop_at: float | None = None  # the time of SIGKILL after SIGTERM
        self.terminated = False
        self.wake, poke = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(poke, warn_on_full_buffer=False)
        for number in ENDING:
            signal.signal(number, self.on_term)
        signal.signal(PARENT_DIED, self.on_parent_died)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes the select
        for number in (signal.SIGUSR2, signal.SIGXCPU):  # LSF and SGE send them to every process of a job
            signal.signal(number, signal.SIG_IGN)

    def on_term(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True
        self.signal_group(signal.SIGTERM)

    def on_parent_died(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self.parent:
            self.end_soon()

    def end_soon(self) -> None:
        """SIGTERM now, SIGKILL after the grace period."""
        if self.stop_at is None:
            self.stop_at = time.monotonic() + self.grace
            self.signal_group(signal.SIGTERM)

    def signal_group(self, number: int) -> None:
        if self.child:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(self.child, number)

    def run(self, command: list[str]) -> int:
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process, which can find them
        prctl(PR_SET_PDEATHSIG, PARENT_DIED)
        self.child = spawn(command, self.pipe)
        if os.getppid() != self.parent:  # the parent died before the signal was requested
            self.end_soon()
        if self.terminated:  # SIGTERM came before the group existed
            self.signal_group(signal.SIGTERM)
        while self.status is None:
            self.watch()
            self.reap()
        self.end_leftovers()
        for pattern in self.remove:
            for path in glob.glob(pattern):  # noqa: PTH207 - a pattern of a whole path
                delete(Path(path))
        return os.waitstatus_to_exitcode(self.status)

    def watch(self) -> None:
        """Sleep until a signal, a message from the parent, or the deadline."""
        timeout = None if self.stop_at is None else max(0.0, 1000 * (self.stop_at - time.monotonic()))
        polled = select.poll()  # `select` takes no descriptor above 1023
        for descriptor in (self.wake, self.pipe):
            if descriptor >= 0:
                polled.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in polled.poll(timeout)]
        if self.wake in ready:
            os.read(self.wake, 4096)
        if self.pipe in ready:
            message = os.read(self.pipe, 1)
            os.close(self.pipe)
            self.pipe = -1
            self.end_soon()
            if message == KILL_NOW:  # otherwise the parent has ended, which closes its end of the pipe
                self.stop_at = time.monotonic()
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            kill_tree(signal.SIGKILL, spare_trackers=True)
            self.stop_at = time.monotonic() + 0.2  # again, for processes that were started meanwhile

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.child:
                    self.status = found[1]

    def end_leftovers(self) -> None:
        """End the processes that the command left behind."""
        grace = time.monotonic() + (0.0 if self.stop_at is not None else LEFTOVER_GRACE)
        kill_tree(signal.SIGTERM)
        while descendants() and time.monotonic() < grace + KILL_WAIT:
            if time.monotonic() > grace:
                # trackers get the time to unlink the shared memory of processes that were killed
                kill_tree(signal.SIGKILL, spare_trackers=time.monotonic() < grace + LEFTOVER_GRACE)
            time.sleep(0.02)
            self.reap()


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(command: list[str], pipe: int) -> int:
    """Start the command in a new process group, which dies with the guard. Returns its pid."""
    # a signal between fork and exec would reach the guard's handlers and be lost
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # parent and child both do it, to avoid a race
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(pipe)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would inherit that
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as SIGUSR2
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def descendants() -> list[int]:
    """All living descendants of this process, in any process group or session."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents[int(folder.name)] = int(fields[1])
    found: list[int] = []
    level = {os.getpid()}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found += level
    return found


def kill_tree(number: int, spare_trackers: bool = False) -> None:
    """Signal all descendants. spare_trackers: not Python's resource trackers, which end after their processes."""
    for pid in descendants():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if not (spare_trackers and TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()):
                os.kill(pid, number)


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    name, orders, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(15, f"guard {name}".encode()[:15], 0, 0, 0)  # PR_SET_NAME
    code = Guard(**json.loads(orders)).run(command)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
