"""Running code that a model wrote: the program in one process, its tests in another, neither able to leave."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from grpocli.sandbox.backends import Way
from grpocli.sandbox.cgroup import group
from grpocli.sandbox.clock import Clock
from grpocli.sandbox.inside.protocol import encode, plain

HERE = str(Path(__file__).parent)
START = f"import sys; sys.path.insert(0, {HERE!r}); from inside.main import main; main()"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
TESTS_MB = 64
"""Of memory, for the processes that are no program's."""
SHORTEST = 0.02
"""Seconds between two looks at what a program has spent."""
START_SECONDS = 10.0
"""To begin, on a busy machine; the time limit of the code begins after that."""
SHUT_IN = "shut in"
GONE = "Closed: "
"""How the problem of a test begins whose program has ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    """timeout: seconds for the program and all tests. processes: that it may start. memory_mb: of each process, and of
    all together where there are control groups.

    disk_mb: in its folder /tmp, which is in memory, and of what it prints.
    """

    timeout: float = 5.0
    memory_mb: int = 512
    processes: int = 4
    disk_mb: int = 16


@dataclass(frozen=True, slots=True)
class Job:
    """text: a completion with the program. before: code before it. setup: code before the tests.

    tests: each passes unless it raises. reference: a right program, and entry: the name of the function that is asked
    for; both say which names of the tests are the program's (`inside.tests.Example`).
    """

    text: str
    tests: Sequence[str]
    before: str = ""
    setup: str = ""
    reference: str = ""
    entry: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """passed: for each test, in order. wrong: why the first one that did not pass did not. printed: by the program.

    heard: after so many tests the program was gone, or out of time.
    """

    passed: list[bool]
    wrong: str = ""
    printed: str = ""
    heard: int = 0


class SandboxError(Exception):
    """The program could not be run or tested; it is not known whether it is right. The text says why."""


def run(job: Job, limits: Limits, way: Way, every: bool = False) -> Verdict:
    """Raises SandboxError where a process could not be shut in, or where the fault is not the program's.

    every: tests after one that hangs or ends the program run too, with a new one, as long as twice `timeout` allows.
    """
    verdict, spent = _run(job, limits, way)
    passed, done = list(verdict.passed), verdict.heard
    while every and done < len(job.tests) and (left := 2 * limits.timeout - spent) > SHORTEST:
        rest = replace(job, tests=job.tests[done:])
        try:
            more, seconds = _run(rest, replace(limits, timeout=min(left, limits.timeout)), way)
        except SandboxError:  # too little time was left; the verdict on the first tests stands
            break
        passed[done:] = more.passed
        done, spent = done + more.heard, spent + seconds
    return replace(verdict, passed=passed)


def _run(job: Job, limits: Limits, way: Way) -> tuple[Verdict, float]:
    """And the seconds that it has spent."""
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as stack:
        enter = stack.enter_context(group(limits.memory_mb + limits.disk_mb + TESTS_MB))
        program = stack.enter_context(_process(way, limits, theirs, {"text": job.text, "before": job.before}, enter))
        tests = stack.enter_context(_process(way, limits, ours, _of_tests(job), enter))
        ours.close()
        theirs.close()
        program.wait_shut()
        tests.wait_shut()
        clock = Clock([program.process.pid, tests.process.pid])
        in_time = tests.ended_within(limits.timeout, clock)
        spent = clock.spent()
        tests.kill()  # first, or it would still write that the program is gone
        program.kill()
        return _verdict(job, tests.verdict().split("\n")[:-1], program.printed(), in_time, limits), spent


def _verdict(job: Job, lines: list[str], printed: str, in_time: bool, limits: Limits) -> Verdict:
    """lines: as `inside.tests.run` writes them."""
    late = f"took longer than {limits.timeout:g} s"
    if not lines:
        raise SandboxError(f"what comes before its tests {'ended early' if in_time else late}")
    if lines[0]:
        raise SandboxError(f"its tests cannot be run: {lines[0]}")
    results = lines[1 : 1 + len(job.tests)]
    passed = [result == "" for result in results] + [False] * (len(job.tests) - len(results))
    wrong = next(filter(None, results), "")
    if not wrong and not all(passed):
        wrong = "the tests ended early" if in_time else f"it {late}"
    ended = next((i for i, result in enumerate(results) if result.startswith(GONE)), len(results))
    return Verdict(passed, wrong, printed, heard=min(ended + 1, len(job.tests)))


def _of_tests(job: Job) -> dict[str, Any]:
    whole = job.before + job.reference if job.reference else ""
    return {"tests": list(job.tests), "setup": job.setup, "reference": whole, "entry": job.entry if whole else ""}


class _Shut:
    """A process on its way into the sandbox, or in it."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, verdict: int, printed: IO[bytes]) -> None:
        self.process, self._status, self._verdict, self._printed = process, status, verdict, printed
        self._deadline = time.monotonic() + START_SECONDS

    def wait_shut(self) -> None:
        """Raises SandboxError."""
        waited = select.select([self._status], [], [], max(0.0, self._deadline - time.monotonic()))[0]
        said = os.read(self._status, 4096).decode(errors="replace") if waited else "it did not start in time"
        if said != SHUT_IN:
            self.kill()
            raise SandboxError(said or self.printed().strip()[-300:] or "it ended at once")

    def ended_within(self, seconds: float, clock: Clock) -> bool:
        try:
            ended = os.pidfd_open(self.process.pid)  # waiting with a timeout would look every 50 ms
        except OSError as error:
            raise SandboxError(f"cannot wait for a process: {error.strerror}; Linux 5.3 or later is needed") from error
        try:
            while (left := seconds - clock.spent()) > 0:
                if select.select([ended], [], [], max(SHORTEST, min(left, seconds / 4)))[0]:
                    return True
            return False
        finally:
            os.close(ended)

    def kill(self) -> None:
        """The whole group; what is in a namespace of processes ends with the first one in it."""
        if self.process.returncode is None:  # once it is waited for, its number may be another's
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def verdict(self) -> str:
        return _text(self._verdict)

    def printed(self) -> str:
        self._printed.seek(0)
        return self._printed.read(4096).decode(errors="replace")


@contextlib.contextmanager
def _process(
    way: Way, limits: Limits, end: socket.socket, part: dict[str, Any], enter: Sequence[str]
) -> Iterator[_Shut]:
    """Start one of the two; it is killed at the end. enter: what comes before its command."""
    with contextlib.ExitStack() as stack:
        verdict, said = (stack.enter_context(os.fdopen(os.memfd_create(name), "r+b")) for name in ("verdict", "said"))
        status, told = (
            stack.enter_context(os.fdopen(fd, mode)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        handed = [end.fileno(), told.fileno(), *([verdict.fileno()] if "tests" in part else [])]
        order = {**asdict(limits), **way.order, **part}
        order |= {"status": told.fileno(), "wire": end.fileno(), "verdict": verdict.fileno()}
        command = [*way.command(limits.disk_mb), way.python.path, "-I", "-u", *way.python.options, "-c", START]
        process = _started(enter, command, said, handed)
        told.close()
        shut = _Shut(process, status.fileno(), verdict.fileno(), said)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(encode(order, plain))
            yield shut
        finally:
            shut.kill()


def _started(
    enter: Sequence[str], command: Sequence[str], said: IO[bytes], handed: Sequence[int]
) -> subprocess.Popen[bytes]:
    try:
        if not shutil.which(command[0]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return subprocess.Popen(
            [*enter, *command], stdin=subprocess.PIPE, stdout=said, stderr=said, env=ENVIRONMENT, pass_fds=handed,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SandboxError(f"{command[0]} does not start: {error.strerror}") from error


def _text(file: int) -> str:
    return os.pread(file, 2**20, 0).decode(errors="replace")
