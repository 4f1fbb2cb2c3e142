"""A pool of worker processes with a deadline for each item; an item that hangs or crashes costs only its own result.

A worker runs `serve`: it imports a module, reads items and writes results as JSON lines, and dies with its parent.
README.md here says why this is not pebble.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from queue import LifoQueue
from typing import IO, Any, BinaryIO, TextIO

from grpocli.config.environment import SECRET
from grpocli.errors import RunError
from grpocli.processes.reaper import die_with_parent
from grpocli.processes.signals import handle_stops, restore
from grpocli.processes.threads import GRACE, run_in_thread
from grpocli.rewards.reward import Failure, Forfeit, Overrun
from grpocli.text import clean
from grpocli.version import PACKAGE

START_TIMEOUT = 120.0
FULL_TIMEOUTS = 8
"""Overruns in one `map` after which the remaining items get REDUCED times the timeout."""
REDUCED = 0.1
MOST_MEMORY = 4 * 2**30
"""Bytes of address space of a worker: a power tower in a completion can request all of the machine's memory."""
FORKED = 70
"""Exit code of a process that the function has forked and that returned from it."""
PASSED_ON = re.compile(
    r"(PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|TZ|TMPDIR|SSL_CERT_FILE|SSL_CERT_DIR|VIRTUAL_ENV|HF_HOME|HF_HUB_OFFLINE"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON[A-Z]+|(LC|OMP|MKL|OPENBLAS|XDG|GRPOCLI|CUDA|NVIDIA)_\w+)"
)
"""Names of the environment variables that workers get, unless they may hold a key or a token."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)
"""Exit codes of a worker that was killed from outside, for instance by the system when memory runs out."""


class PoolClosed(RunError):
    """Another thread has closed the pool, as at the end of a run. Not a failure of a reward."""


class Worker:
    """A worker process."""

    def __init__(self, function: str, variables: Collection[str], trusted: bool, first: Any) -> None:
        # -P: a random.py in the working directory must not hide the library's
        start = f"from grpocli.rewards.worker_pool import serve; serve({function!r}, limited={not trusted})"
        path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        passed_on = {name for name in os.environ if PASSED_ON.fullmatch(name) and not SECRET.search(name)}
        env = {name: value for name, value in os.environ.items() if name in {*passed_on, *variables}}
        env |= {"PYTHONPATH": path} | ({} if trusted else {"OMP_NUM_THREADS": "1"})
        self._socket, theirs = socket.socketpair()
        with theirs:  # output of libraries would disturb the live view; errors are part of the results
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", start],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE if trusted else subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", **env},
                process_group=0,  # so that what it has started ends with it
            )
        if stderr := self.process.stderr:
            run_in_thread(lambda: _print(stderr), "worker output")
        self.ready = False
        self._first, self._buffer = first, b""
        if first is not None:
            with contextlib.suppress(ConnectionError):  # a dead worker is noticed when it is read from
                self._send(first, START_TIMEOUT)

    def start(self, function: str) -> None:
        """Wait until it has imported its module and done its first item. Raises RunError if it cannot."""
        try:
            problem = self._receive(START_TIMEOUT)
            if not problem and self._first is not None:
                self._receive(START_TIMEOUT)
        except (TimeoutError, ConnectionError) as error:
            problem = str(error) or type(error).__name__
        if problem:
            raise RunError(f"a worker process for {function} did not start: {problem}")
        self.ready = True

    def call(self, item: Any, seconds: float) -> Any:
        """The function's result for an item, or a Failure if it raises.

        Raises TimeoutError after `seconds`, ConnectionError if the process ends.
        """
        deadline = time.monotonic() + seconds
        self._send(item, seconds)
        result, problem = self._receive(deadline - time.monotonic())
        return Failure(problem) if problem else result

    def _send(self, item: Any, seconds: float) -> None:
        *plain, payload = item if isinstance(item[-1], bytes) else (*item, b"")
        self._socket.settimeout(seconds)
        self._socket.sendall(json.dumps([len(payload), *plain]).encode() + b"\n" + payload)

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            if not (piece := self._socket.recv(65536)):
                raise ConnectionError("its process died")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def end(self, grace: float = 0.0) -> None:
        """End the process, and kill it after `grace` seconds. No other thread may be using it."""
        with contextlib.suppress(OSError):  # it is dead
            self._socket.shutdown(socket.SHUT_WR)  # which ends it, after its exit handlers
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.kill()
        self.process.wait()
        self._socket.close()

    def kill(self) -> None:
        """Kill the process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _print(stderr: IO[bytes]) -> None:
    """Print what a worker prints, where this process prints: above a live view, or to the log."""
    with stderr:
        for line in stderr:
            print(clean(line.decode(errors="replace")), end="", file=sys.stderr, flush=True)


class WorkerPool:
    """Calls a function in worker processes, which live from the first `map`, or from `start`, until `close`.

    function: `module:name`. timeout: seconds for an item. variables: names of environment variables that the workers
    get besides PASSED_ON. trusted: whether the function is the user's, which may take any memory and may print. first:
    an item for each worker that starts, such as one that loads a file; its time does not count.
    """

    def __init__(
        self,
        function: str,
        workers: int,
        timeout: float,
        variables: Collection[str] = (),
        trusted: bool = False,
        first: Any = None,
    ) -> None:
        self.function, self.size, self.timeout, self.variables = function, workers, timeout, variables
        self.trusted, self.first = trusted, first
        self._workers: list[Worker] = []
        weakref.finalize(self, _end_all, self._workers, 0.0)  # where an error ended a run before `close`
        self._idle: LifoQueue[Worker] = LifoQueue()
        self._closed = False
        self._items = 0
        """Of the calls of `map` that run; several threads may call it at once."""
        self._changing = threading.RLock()
        self._starter = ThreadPoolExecutor(1, "pool")  # a worker dies with the thread that started it
        self._callers = ThreadPoolExecutor(workers, "workers")

    def map(self, items: Sequence[Any]) -> list[Any]:
        """The function's result for each item, in order, or a Failure.

        Items are lists of JSON values, of which the last may be bytes instead; results are JSON values.
        An Overrun is the Failure of an item that took too long or that crashed its worker. After FULL_TIMEOUTS overruns
        in one call the timeout is a tenth. An item whose worker dies is tried once more; if the second worker is killed
        from outside, the result is a Failure and no Overrun.

        Raises RunError if no worker starts, PoolClosed if another thread closes the pool.
        """
        with self._changing:
            if self._closed and self._items:
                raise PoolClosed(f"{self.function} was ended while it scored")
            self.start(min(self.size, self._items + len(items)))
            self._items += len(items)
        overruns: list[Overrun] = []
        calls: list[Future[Any]] = []
        try:
            calls += [self._callers.submit(self._call, item, overruns) for item in items]
            return [call.result() for call in calls]
        except BaseException as error:
            ended = self._closed
            for call in calls:
                call.cancel()
            self._kill()  # a late result must not be taken for a result of the next call
            wait(calls)
            if ended and isinstance(error, RunError | RuntimeError):
                raise PoolClosed(f"{self.function} was ended while it scored") from error
            raise
        finally:
            with self._changing:
                self._items -= len(items)
                if self._closed and not self._items:
                    self._end_workers()

    def start(self, n: int | None = None) -> None:
        """Start all workers, or at least n, without waiting for their imports, which take seconds."""
        with self._changing:
            self._closed = False
            while len(self._workers) < (self.size if n is None else n):
                self._idle.put(self._new())

    def _new(self) -> Worker:
        worker = self._starter.submit(Worker, self.function, self.variables, self.trusted, self.first).result()
        self._workers.append(worker)
        if self._closed:  # meanwhile, by another thread
            worker.kill()
        return worker

    def _call(self, item: Any, overruns: list[Overrun]) -> Any:
        """The result of one item, from an idle worker. overruns: those of this `map`, to which it adds."""
        seconds = self.timeout * (REDUCED if len(overruns) >= FULL_TIMEOUTS else 1.0)
        worker = self._idle.get()
        try:
            for retries_left in (1, 0):
                try:
                    if not worker.ready:
                        worker.start(self.function)
                    return worker.call(item, seconds)
                except TimeoutError:
                    overrun = Overrun(f"it took longer than {seconds:g} s")
                    worker = self._replaced(worker)
                    break
                except ConnectionError:
                    overrun = Overrun("its worker process died", late=False)
                    code, worker = worker.process.wait(), self._replaced(worker)
                    if not retries_left and code in KILLED:
                        return Failure("its worker process was killed twice")
            overruns.append(overrun)
            return overrun
        finally:
            self._idle.put(worker)

    def _replaced(self, worker: Worker) -> Worker:
        """A new worker instead of one that hangs or has died. Raises RunError if the pool is being closed."""
        if self._closed:
            raise RunError("the pool is closed")
        worker.end()
        self._workers.remove(worker)
        return self._new()

    def _kill(self) -> None:
        self._closed = True
        for worker in list(self._workers):
            worker.kill()

    def close(self) -> None:
        """End the workers. A `map` that runs in another thread raises PoolClosed."""
        with self._changing:
            self._closed = True
            if self._items:
                self._kill()
            else:
                self._end_workers()

    def _end_workers(self) -> None:
        _end_all(self._workers, GRACE if self.trusted else 0.0)  # of exit handlers, which may flush a log
        self._idle = LifoQueue()


def _end_all(workers: list[Worker], grace: float) -> None:
    while workers:
        workers.pop().end(grace)


def default_workers() -> int:
    """One worker for each core of this process, divided by the trainer processes of this machine; at most eight."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // processes))


@lru_cache(maxsize=8)
def shared_pool(function: str, workers: int, timeout: float) -> WorkerPool:
    """The pool of all rewards with these settings. workers: 0 is `default_workers()`."""
    return WorkerPool(function, workers or default_workers(), timeout)


def score_items(pool: WorkerPool, items: Sequence[Any], without_completion: Sequence[Any]) -> list[Any]:
    """The pool's result for each item, or a Failure; a Forfeit of 0 if the completion takes too long.

    without_completion: the same items without their completions. An item that takes too long is tried in this form:
    if that fails as well, the data is at fault, and the result is a Failure.
    """
    found = pool.map(items)
    late = [i for i, score in enumerate(found) if isinstance(score, Overrun)]
    for i, score in zip(late, pool.map([without_completion[i] for i in late]), strict=True):
        found[i] = score if isinstance(score, Failure) else Forfeit(0.0, found[i].reason)
    return found


def serve(function: str, limited: bool) -> None:
    """Serve `module:name` in this process, a worker, until its input ends.

    It writes null, or why the module cannot be imported; then for each item [result, null] or [null, reason].
    limited: cap its address space at MOST_MEMORY.
    """
    die_with_parent()
    before = handle_stops(lambda *_: None)  # the run finishes its step and then ends its workers
    os.register_at_fork(after_in_child=lambda: restore(before))  # a function may end its own processes
    if limited:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY if hard < 0 else min(MOST_MEMORY, hard), hard))
    with contextlib.suppress(OSError), os.fdopen(os.dup(0), "rb") as given, os.fdopen(os.dup(1), "w") as out:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what the function prints must not mix with the results
        _serve(function, given, out)  # until its input ends, or the function has closed what is not its own


def _serve(function: str, given: BinaryIO, out: TextIO) -> None:
    try:
        module, _, name = function.partition(":")
        called: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        print(json.dumps(f"{type(error).__name__}: {error}"), file=out, flush=True)
        return
    print("null", file=out, flush=True)
    process = os.getpid()
    for line in given:
        try:
            size, *item = json.loads(line)
            message = json.dumps([called(*item, *([given.read(size)] if size else [])), None])
        except Exception as error:  # noqa: BLE001 - the parent counts it
            message = json.dumps([None, str(error) or type(error).__name__])
        if os.getpid() != process:  # a process that the function forked must not serve items
            os._exit(FORKED)
        print(message, file=out, flush=True)
