"""A pool of worker processes with a deadline for each item; an item that hangs or crashes costs only its own result.

A worker is `python -m grpocli.rewards.worker_process module:function`. It imports that module, reads items and
writes results as JSON lines, and dies with its parent. README.md here says why this is not pebble.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from grpocli.errors import RunError
from grpocli.rewards.reward import Failure, Forfeit, Overrun
from grpocli.rewards.worker_process import READY
from grpocli.version import PACKAGE

START_TIMEOUT = 120.0
FULL_TIMEOUTS = 8
"""Overruns in one `map` after which the remaining items get REDUCED times the timeout."""
REDUCED = 0.1
MOST_REMEMBERED = 10_000
"""Items whose overrun is remembered, so that they are not tried again."""
PASSED_ON = re.compile(
    r"(PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|TZ|TMPDIR|SSL_CERT_FILE|SSL_CERT_DIR|VIRTUAL_ENV|HF_HOME|HF_HUB_OFFLINE"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON[A-Z]+|(LC|OMP|MKL|OPENBLAS|XDG|GRPOCLI|CUDA|NVIDIA)_\w+)"
)
"""Names of the environment variables that workers get. None of them holds a key or a token."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)
"""Exit codes of a worker that was killed from outside, for instance by the system when memory runs out."""


def withheld(reason: str, variables: Collection[str]) -> str:
    """A hint if a failure names an exported variable that its worker did not get; "" otherwise."""
    for name in dict.fromkeys(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", reason)):
        if name in os.environ and name not in variables and not PASSED_ON.fullmatch(name):
            return f"if it needs {name}, name it in task.environment.env=[{name}]"
    return ""


class PoolClosed(RunError):
    """Another thread has closed the pool, as at the end of a run. Not a failure of a reward."""


class Worker:
    """A worker process and the item that it computes.

    variables: names of environment variables that it gets besides PASSED_ON.
    """

    def __init__(self, function: str, variables: Collection[str]) -> None:
        # -P: a random.py in the working directory must not hide the library's
        command = [sys.executable, "-P", "-m", "grpocli.rewards.worker_process", function]
        path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        seen = {name: value for name, value in os.environ.items() if name in variables or PASSED_ON.fullmatch(name)}
        env = {**seen, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": path}
        # output of libraries would disturb the live view; errors are part of the results
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )
        self.item: int | None = None
        self.ready = False
        self.timeout = START_TIMEOUT
        self.deadline = time.monotonic() + self.timeout
        self._buffer = b""

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, index: int, item: Any, timeout: float) -> None:
        assert self.process.stdin is not None
        self.item, self.timeout, self.deadline = index, timeout, time.monotonic() + timeout
        self.process.stdin.write(json.dumps(item).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """The next message, [result] or [null, reason]; None if it is incomplete. Raises EOFError at the end."""
        piece = os.read(self.fileno(), 65536)
        if not piece:
            raise EOFError
        self._buffer += piece
        if b"\n" not in self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # unwritten input is lost with the worker
                stream.close()


@dataclass
class Items:
    """The items of one `WorkerPool.map`, as JSON, and their results (None: pending).

    waiting: indices of items that no worker has got yet. retried: indices of items whose first worker died.
    overruns: number of items that took too long.
    """

    keys: list[str]
    results: list[Any]
    retried: set[int] = field(default_factory=set)
    overruns: int = 0

    def __post_init__(self) -> None:
        self.waiting = deque(i for i, result in enumerate(self.results) if result is None)


class WorkerPool:
    """Calls a function in worker processes, which live until `close`. They start at the first `map`, or with `start`.

    function: `module:name`. timeout: seconds for an item. variables: names of environment variables that the workers
    get besides PASSED_ON. remember: whether an item that took too long is not tried again, since it would again.
    """

    def __init__(
        self, function: str, workers: int, timeout: float, variables: Collection[str] = (), remember: bool = True
    ) -> None:
        self.function, self.size, self.timeout, self.variables = function, workers, timeout, variables
        self.remember = remember
        self._workers: list[Worker] = []
        self._overruns: dict[str, Overrun] = {}
        self._closed = False
        self._mapping = threading.RLock()
        self._starter = ThreadPoolExecutor(1, "pool")  # a worker dies with the thread that started it

    def map(self, items: Sequence[Any]) -> list[Any]:
        """The function's result for each item, in order, or a Failure; items and results are JSON values.

        An Overrun is the Failure of an item that took too long, in this or an earlier call, or that crashed its worker.
        After FULL_TIMEOUTS overruns in one call the timeout is a tenth. An item whose worker dies is tried once more;
        if the second worker is killed from outside, the result is a Failure and no Overrun.

        Raises RunError if no worker starts, PoolClosed if another thread closes the pool.
        """
        with self._mapping:
            self._closed = False
            try:
                return self._map(items)
            except BaseException:
                self.close()  # a late result must not be taken for a result of the next call
                raise

    def _map(self, given: Sequence[Any]) -> list[Any]:
        keys = [json.dumps(item) for item in given]
        items = Items(keys, [self._overruns.get(key) for key in keys])
        while any(result is None for result in items.results):
            if self._closed:
                raise self._ended()
            self._fill(min(self.size, len(given)))
            for worker in self._workers:
                if worker.ready and worker.item is None and items.waiting:
                    index = items.waiting.popleft()
                    share = REDUCED if items.overruns >= FULL_TIMEOUTS else 1.0
                    with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed when it is read from
                        worker.send(index, given[index], self.timeout * share)
            self._receive(items)
        return items.results

    def start(self) -> None:
        """Start the workers without waiting for their imports, which take seconds."""
        self._fill(self.size)

    def _fill(self, n: int) -> None:
        """Start missing workers and replace idle ones that have died."""
        for worker in [w for w in self._workers if w.ready and w.item is None]:
            if worker.process.poll() is not None:
                worker.kill()
                self._workers.remove(worker)
        while len(self._workers) < n:
            self._workers.append(self._starter.submit(Worker, self.function, self.variables).result())

    def _receive(self, items: Items) -> None:
        """Wait for results until the first deadline, and kill the workers that miss theirs."""
        busy = [w for w in self._workers if w.item is not None or not w.ready]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker, selectors.EVENT_READ)
            seconds = max(0.0, min(w.deadline for w in busy) - time.monotonic())
            readable = [key.fileobj for key, _ in selector.select(seconds)]
        for worker in busy:
            if worker in readable:
                self._take(worker, items)
            elif time.monotonic() >= worker.deadline:
                self._remove(worker, f"it took longer than {worker.timeout:g} s")
                self._overrun(worker, items, Overrun(f"it took longer than {worker.timeout:g} s"))

    def _take(self, worker: Worker, items: Items) -> None:
        try:
            message = worker.receive()
        except EOFError:
            self._remove(worker, "its worker process died")
            self._retry(worker, items)
            return
        if message is None:
            return
        if not worker.ready:
            if message != READY:
                self._remove(worker, message[1])
            worker.ready = True
            return
        assert worker.item is not None
        items.results[worker.item] = Failure(message[1]) if message[0] is None else message[0]
        worker.item = None

    def _ended(self) -> PoolClosed:
        return PoolClosed(f"{self.function} was ended while it scored")

    def _remove(self, worker: Worker, reason: str) -> None:
        """Kill a worker. Raises RunError if it had not started, PoolClosed if another thread has closed the pool."""
        worker.kill()
        self._workers.remove(worker)
        if self._closed:
            raise self._ended()
        if worker.item is None:
            raise RunError(f"a worker process for {self.function} did not start: {reason}")

    def _retry(self, worker: Worker, items: Items) -> None:
        """Try the item of a dead worker once more."""
        assert worker.item is not None
        if worker.item not in items.retried:
            items.retried.add(worker.item)
            items.waiting.append(worker.item)
        elif worker.process.returncode in KILLED:
            items.results[worker.item] = Failure("its worker process was killed twice")
        else:
            self._overrun(worker, items, Overrun("its worker process died", late=False))

    def _overrun(self, worker: Worker, items: Items, overrun: Overrun) -> None:
        """Record an overrun; one of the full timeout is remembered for later calls."""
        assert worker.item is not None
        items.results[worker.item] = overrun
        items.overruns += 1
        if self.remember and worker.timeout >= self.timeout and len(self._overruns) < MOST_REMEMBERED:
            self._overruns[items.keys[worker.item]] = overrun

    def close(self) -> None:
        """Kill the workers. A `map` that runs in another thread raises PoolClosed."""
        self._closed = True
        if not self._mapping.acquire(blocking=False):
            for worker in list(self._workers):
                worker.process.kill()
            return
        try:
            for worker in self._workers:
                worker.kill()
            self._workers = []
        finally:
            self._mapping.release()


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
    found = _map_distinct(pool, items)
    late = [i for i, score in enumerate(found) if isinstance(score, Overrun)]
    for i, score in zip(late, _map_distinct(pool, [without_completion[i] for i in late]), strict=True):
        found[i] = score if isinstance(score, Failure) else Forfeit(0.0, found[i].reason)
    return found


def _map_distinct(pool: WorkerPool, items: Sequence[Any]) -> list[Any]:
    """The pool's results; equal items are computed once."""
    keys = [json.dumps(item) for item in items]
    distinct = dict(zip(keys, items, strict=True))
    results = dict(zip(distinct, pool.map(list(distinct.values())), strict=True))
    return [results[key] for key in keys]
