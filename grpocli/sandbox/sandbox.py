"""Runs a program that a model wrote, and its tests, in two isolated processes.

`run` starts both processes and connects them by a socket. Each one isolates itself (`inside.main`): namespaces or
bubblewrap hide the network, other processes and most files, resource limits bound memory, processor time, processes and
file sizes, and a seccomp filter refuses dangerous system calls. Then one executes the program (`inside.program`), the
other runs the tests (`inside.tests`) and asks the first for each result it needs, as plain values (`inside.protocol`).
`run` waits until the tests end or the time limit is over, kills both, and reads the results that the tests' process has
written. The program cannot reach the file with the results.
"""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from grpocli.sandbox.cgroup import group
from grpocli.sandbox.inside.protocol import encode, plain

HERE = str(Path(__file__).parent)
START = f"import sys; sys.path = [{HERE!r}, *filter(None, sys.path)]; from inside.main import main; main()"
"""Without the working directory. -I would do that, too, but ignores PYTHONHASHSEED."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
TESTS_MB = 64
"""Memory of the processes that do not run the program."""
SHORTEST_WAIT = 0.02
"""Seconds between two readings of the clock, and below which wall-clock time is exact enough."""
START_TIMEOUT = 10.0
"""Seconds to start and isolate a process on a busy machine. The program's time limit begins after that."""
ISOLATED = "isolated"
"""The status that `inside.main` reports."""
MOST_TIMEOUTS = 10
"""The time limits that all inputs of a script may take together."""
MAX_SLOWDOWN = 4.0
"""On a busy machine a program may take up to this many times its time limit."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
GONE = "Closed: "
"""Beginning of the error of a test whose program has ended."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python interpreter that runs programs. folders: those that it needs to read."""

    path: str
    options: Sequence[str]
    folders: Sequence[str]


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to isolate a process."""

    name: str
    python: Interpreter
    command: Callable[[int], list[str]]
    """From the size of /tmp in MB, the words before the interpreter's command line."""
    order: dict[str, Any]
    """Fields for `inside.main`, which does the rest from within the process."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program and its tests."""

    timeout: float = 5.0
    """Seconds for the program and all tests; for each input of a script, of which all have `MOST_TIMEOUTS` times as
    long."""
    memory_mb: int = 512
    """Of each process, and with control groups of all processes together."""
    processes: int = 4
    """The number that the program may start."""
    disk_mb: int = 16
    """Of the folder /tmp, which is in memory, and of the program's output."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A program to test."""

    text: str
    """The program; if not `whole`, a text that begins with it."""
    tests: Sequence[str | tuple[str, str]]
    """Code that passes unless it raises, or a standard input and the output that the program has to print."""
    before: str = ""
    """Code before the program."""
    setup: str = ""
    """Code before the tests."""
    reference: str = ""
    """A right program."""
    entry_point: str = ""
    """The name of the function that the question asks for. It and `reference` decide which names in the tests are the
    program's, see `inside.tests.Example`."""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class SubmissionResult:
    """The results of a submission's tests.

    passed: for each test, in order. error: of the first test that failed. printed: the program's output. completed:
    number of tests up to the one at which the program ended or ran out of time.
    """

    passed: list[bool]
    error: str = ""
    printed: str = ""
    completed: int = 0


class SandboxError(Exception):
    """The program could not be run or tested, so it is unknown whether it is right. The text gives the reason."""


def run(submission: Submission, limits: Limits, backend: Backend, all_tests: bool = False) -> SubmissionResult:
    """Run a program and its tests.

    all_tests: tests after one that hangs or ends the program run in a new process, too, until one timeout more is over.
    Raises SandboxError if a process could not be isolated, or for any other cause outside the program.
    """
    result, used = _run_once(submission, limits, backend)
    passed, done = list(result.passed), result.completed
    while all_tests and done < len(submission.tests) and used < limits.timeout * (1 + _timeouts(submission)):
        more, seconds = _run_once(replace(submission, tests=submission.tests[done:]), limits, backend)
        passed[done:] = more.passed
        done, used = done + more.completed, used + seconds
    return replace(result, passed=passed)


def _run_once(submission: Submission, limits: Limits, backend: Backend) -> tuple[SubmissionResult, float]:
    """The result and the seconds used."""
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as stack:
        enter = stack.enter_context(group(limits.memory_mb + limits.disk_mb + TESTS_MB))
        task = {"text": submission.text, "before": submission.before, "whole": submission.whole}
        known = {"reference": submission.before + submission.reference, "entry_point": submission.entry_point}
        known = known if submission.reference else dict.fromkeys(known, "")
        check = {"tests": list(submission.tests), "setup": submission.setup, **known}
        timeouts = _timeouts(submission)
        most = replace(limits, processes=limits.processes + (timeouts > 1))  # a script runs in a process of its own
        program = stack.enter_context(_process(backend, most, theirs, task, enter))
        tests = stack.enter_context(_process(backend, limits, ours, check, enter))
        ours.close()
        theirs.close()
        program.wait_isolated()
        tests.wait_isolated()
        clock = Clock([program.process.pid, tests.process.pid])
        in_time = tests.ended_within(limits.timeout, timeouts * limits.timeout, clock)
        used = clock.spent()
        tests.kill()  # before the program, whose end it would report as a failed test
        program.kill()
        lines = tests.results().split("\n")[:-1]
        return _result(submission, lines, program.printed(), in_time, limits), used


def _timeouts(submission: Submission) -> int:
    """The time limits that the tests may take together."""
    return 1 if all(isinstance(test, str) for test in submission.tests) else MOST_TIMEOUTS


def _result(submission: Submission, lines: list[str], printed: str, in_time: bool, limits: Limits) -> SubmissionResult:
    """The result from the lines that `inside.tests.run` has written."""
    late = f"took longer than {limits.timeout:g} s"
    if not lines:
        raise SandboxError(f"the code before its tests {'ended early' if in_time else late}")
    if lines[0]:
        hint = "; reward.code.python has to name an interpreter with it" if "ModuleNotFoundError" in lines[0] else ""
        raise SandboxError(f"its tests cannot be run: {lines[0]}{hint}")
    errors = lines[1 : 1 + len(submission.tests)]
    passed = [error == "" for error in errors] + [False] * (len(submission.tests) - len(errors))
    first = next(filter(None, errors), "")
    if not first and not all(passed):
        first = "the tests ended early" if in_time else f"it {late}"
    gone = next((i for i, error in enumerate(errors) if error.startswith(GONE)), len(errors))
    return SubmissionResult(passed, first, printed, completed=min(gone + 1, len(submission.tests)))


class _IsolatedProcess:
    """One of the two processes.

    status: pipe for the report of `inside.main`. results: file of the tests' results. printed: file of the output.
    """

    def __init__(self, process: subprocess.Popen[bytes], status: int, results: int, printed: IO[bytes]) -> None:
        self.process, self._status, self._results, self._printed = process, status, results, printed
        self._deadline = time.monotonic() + START_TIMEOUT

    def wait_isolated(self) -> None:
        """Wait until the process is isolated. Raises SandboxError if it fails to isolate itself."""
        ready = select.select([self._status], [], [], max(0.0, self._deadline - time.monotonic()))[0]
        status = os.read(self._status, 4096).decode(errors="replace") if ready else "it did not start in time"
        if status != ISOLATED:
            self.kill()
            raise SandboxError(status or self.printed().strip()[-300:] or "it ended at once")

    def ended_within(self, seconds: float, most: float, clock: Clock) -> bool:
        """Whether the process ends. seconds: between two results. most: in all."""
        try:
            ended = os.pidfd_open(self.process.pid)  # Popen.wait with a timeout polls every 50 ms
        except OSError as error:
            raise SandboxError(f"cannot wait for a process: {error.strerror}; Linux 5.3 or later is needed") from error
        began, written = 0.0, 0
        try:
            while (left := min(began + seconds, most) - clock.spent()) > 0:
                if select.select([ended], [], [], max(SHORTEST_WAIT, min(left, seconds / 4)))[0]:
                    return True
                if written != (written := os.fstat(self._results).st_size):
                    began = clock.spent()
            return False
        finally:
            os.close(ended)

    def kill(self) -> None:
        """Kill the process group; processes in a pid namespace end with its first process."""
        if self.process.returncode is None:  # after wait() another process may have the pid
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def results(self) -> str:
        return os.pread(self._results, 2**20, 0).decode(errors="replace")

    def printed(self) -> str:
        self._printed.seek(0)
        return self._printed.read(4096).decode(errors="replace")


class Clock:
    """The time that processes and their descendants use, from the creation of the clock on.

    Waits for a core do not count, so that a busy machine does not make programs fail.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._computed, self._waited = self._used()

    def spent(self) -> float:
        """Wall-clock seconds without waits for a core, or processor seconds, whichever is more."""
        elapsed = time.monotonic() - self._began
        if elapsed < SHORTEST_WAIT:
            return elapsed
        computed, waited = self._used()
        waited = min(waited - self._waited, elapsed * (1 - 1 / MAX_SLOWDOWN))
        return max(computed - self._computed, elapsed - waited)

    def _used(self) -> tuple[float, float]:
        """Processor seconds of the processes, and seconds that they waited for a core."""
        computed = waited = 0.0
        for pid in _with_descendants(self._pids):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # after the name
                computed += sum(map(int, fields[11:15])) / TICKS_PER_SECOND  # of the process and of its ended children
                waited += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError):  # it has ended, or the kernel has no such count
                continue
        return computed, waited


def _with_descendants(pids: Iterable[int]) -> Iterator[int]:
    """The processes and all their descendants."""
    for pid in pids:
        yield pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                yield from _with_descendants(map(int, children.read_text().split()))


@contextlib.contextmanager
def _process(
    backend: Backend, limits: Limits, connection: socket.socket, task: dict[str, Any], enter: Sequence[str]
) -> Iterator[_IsolatedProcess]:
    """Start one of the two processes; it is killed at the end of the block.

    connection: the process's end of the socket. task: for `inside.program` or `inside.tests`. enter: the words before
    its command.
    """
    with contextlib.ExitStack() as stack:
        results, printed = (
            stack.enter_context(os.fdopen(os.memfd_create(name), "r+b")) for name in ("results", "printed")
        )
        status, report = (
            stack.enter_context(os.fdopen(fd, mode)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        inherited = [connection.fileno(), report.fileno(), *([results.fileno()] if "tests" in task else [])]
        order = {**asdict(limits), **backend.order, **task}
        order |= {"status": report.fileno(), "connection": connection.fileno(), "results": results.fileno()}
        python = backend.python
        command = [*backend.command(limits.disk_mb), python.path, "-s", "-u", *python.options, "-c", START]
        if not shutil.which(command[0]):
            raise SandboxError(f"{command[0]} does not start: {os.strerror(errno.ENOENT)}")
        try:
            process = subprocess.Popen(
                [*enter, *command], stdin=subprocess.PIPE, stdout=printed, stderr=printed, env=ENVIRONMENT,
                pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"{command[0]} does not start: {error.strerror}") from error
        report.close()
        isolated = _IsolatedProcess(process, status.fileno(), results.fileno(), printed)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(encode(order, plain))
            yield isolated
        finally:
            isolated.kill()
