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
import os
import select
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

    program: str
    tests: Sequence[str | tuple[str, str]]
    """Code that passes unless it raises, or a standard input and the output that the program has to print."""
    setup: str = ""
    """Code before the tests."""
    reference: str = ""
    """A right program."""
    entry_point: str = ""
    """The name of the function that the question asks for. It and `reference` decide which names in the tests are the
    program's, see `inside.tests.Example`."""


@dataclass(frozen=True, slots=True)
class SubmissionResult:
    """The results of a submission's tests."""

    passed: list[bool]
    """For each test, in order."""
    error: str = ""
    """Of the first test that failed."""
    printed: str = ""
    """The program's output."""


class SandboxError(Exception):
    """The program could not be run or tested, so it is unknown whether it is right. The text gives the reason."""


def run(submission: Submission, limits: Limits, backend: Backend) -> SubmissionResult:
    """Run a program and its tests.

    Raises SandboxError if a process could not be isolated, or for any other cause outside the program.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as stack:
        enter = stack.enter_context(group(limits.memory_mb + limits.disk_mb + TESTS_MB))
        is_script = not all(isinstance(test, str) for test in submission.tests)
        check = {name: getattr(submission, name) for name in ("setup", "reference", "entry_point")}
        check |= {"tests": list(submission.tests)}
        most = replace(limits, processes=limits.processes + is_script)  # a script runs in a process of its own
        program = _IsolatedProcess(stack, backend, most, theirs, {"program": submission.program}, enter)
        tests = _IsolatedProcess(stack, backend, limits, ours, check, enter)
        ours.close()
        theirs.close()
        program.wait_isolated()
        tests.wait_isolated()
        clock = Clock([program.process.pid, tests.process.pid])
        longest = limits.timeout * (MOST_TIMEOUTS if is_script else 1)
        in_time = tests.ended_within(limits.timeout, longest, clock)
        tests.kill()
        # before the program's end, which the tests' innermost process, still ending, would report as a failed test
        lines = tests.results().split("\n")[:-1]
        program.kill()
        return _result(len(submission.tests), lines, program.printed(), in_time, limits)


def _result(n: int, lines: list[str], printed: str, in_time: bool, limits: Limits) -> SubmissionResult:
    """The result of `n` tests from the lines that `inside.tests.run` has written."""
    late = f"took longer than {limits.timeout:g} s"
    if not lines:
        raise SandboxError(f"the code before its tests {'ended early' if in_time else late}")
    if lines[0]:
        hint = "; reward.code.python has to name an interpreter with it" if "ModuleNotFoundError" in lines[0] else ""
        raise SandboxError(f"its tests cannot be run: {lines[0]}{hint}")
    errors = lines[1 : 1 + n]
    passed = [error == "" for error in errors] + [False] * (n - len(errors))
    first = next(filter(None, errors), "")
    if not first and not all(passed):
        first = "the tests ended early" if in_time else f"it {late}"
    return SubmissionResult(passed, first, printed)


class _IsolatedProcess:
    """One of the two processes."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        backend: Backend,
        limits: Limits,
        connection: socket.socket,
        task: dict[str, Any],
        enter: Sequence[str],
    ) -> None:
        """Start it; the stack kills it.

        connection: the process's end of the socket. task: for `inside.program` or `inside.tests`. enter: the words
        before its command. Raises SandboxError if it does not start.
        """
        self._results, self._printed = (
            stack.enter_context(os.fdopen(os.memfd_create(name), "r+b")) for name in ("results", "printed")
        )
        self._status, report = (
            stack.enter_context(os.fdopen(fd, mode)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        inherited = [connection.fileno(), report.fileno(), *([self._results.fileno()] if "tests" in task else [])]
        order = {**asdict(limits), **backend.order, **task}
        order |= {"status": report.fileno(), "connection": connection.fileno(), "results": self._results.fileno()}
        python = backend.python
        command = [*backend.command(limits.disk_mb), python.path, "-s", "-u", *python.options, "-c", START]
        try:
            self.process = subprocess.Popen(
                [*enter, *command], stdin=subprocess.PIPE, stdout=self._printed, stderr=self._printed, env=ENVIRONMENT,
                pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
            stack.callback(self.kill)
            # Popen.wait with a timeout polls every 50 ms
            self._ended = stack.enter_context(os.fdopen(os.pidfd_open(self.process.pid), "rb", 0))
        except OSError as error:
            raise SandboxError(f"{command[0]} does not start: {error.strerror}") from error
        report.close()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin:
            self.process.stdin.write(encode(order, plain))
        self._deadline = time.monotonic() + START_TIMEOUT

    def wait_isolated(self) -> None:
        """Wait until the process is isolated. Raises SandboxError if it fails to isolate itself."""
        ready = _readable(self._status, max(0.0, self._deadline - time.monotonic()))
        status = os.read(self._status.fileno(), 4096).decode(errors="replace") if ready else "it did not start in time"
        if status != ISOLATED:
            self.kill()
            raise SandboxError(status or self.printed().strip()[-300:] or "it ended at once")

    def ended_within(self, seconds: float, most: float, clock: Clock) -> bool:
        """Whether the process ends. seconds: between two results. most: in all."""
        began, written = 0.0, 0
        while (left := min(began + seconds, most) - clock.spent()) > 0:
            if _readable(self._ended, max(SHORTEST_WAIT, min(left, seconds / 4))):
                return True
            if written != (written := os.fstat(self._results.fileno()).st_size):
                began = clock.spent()
        return False

    def kill(self) -> None:
        """Kill the process group; processes in a pid namespace end with its first process."""
        if self.process.returncode is None:  # after wait() another process may have the pid
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def results(self) -> str:
        return os.pread(self._results.fileno(), 2**20, 0).decode(errors="replace")

    def printed(self) -> str:
        return os.pread(self._printed.fileno(), 4096, 0).decode(errors="replace")


def _readable(file: IO[bytes] | socket.socket, seconds: float) -> bool:
    """Wait until there is something to read; False after so many seconds."""
    polled = select.poll()  # `select` takes no descriptor above 1023
    polled.register(file, select.POLLIN)
    return bool(polled.poll(1000 * seconds))


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
