"""Killable worker processes for scoring that may hang: a deadline for each item, and only that item is lost.

A worker is `python -m grpocli.rewards.pool_worker module:function`. It imports that module and nothing else of
weight, reads items and writes results as JSON lines, and dies with its parent.
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
from typing import Any

from grpocli.errors import RunError
from grpocli.rewards.pool_worker import READY
from grpocli.rewards.reward import Failure, Overrun
from grpocli.version import PACKAGE

START_SECONDS = 120.0
FULL_OVERRUNS = 8
"""Items of one `map` that may take the whole timeout; when so many have run over it, the others have a share of it."""
SHORT = 0.1
"""That share."""
REMEMBERED = 10_000
"""Items whose overrun is remembered, so that they are not tried again."""
PASSED_ON = re.compile(
    r"(PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|TZ|TMPDIR|SSL_CERT_FILE|SSL_CERT_DIR|VIRTUAL_ENV|HF_HOME|HF_HUB_OFFLINE"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON[A-Z]+|(LC|OMP|MKL|OPENBLAS|XDG|GRPOCLI|CUDA|NVIDIA)_\w+)"
)
"""Names of the environment variables that workers get; none that hold keys or tokens."""
OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)
"""Exit codes of a worker that somebody else has ended, such as the system when memory runs out."""


class PoolClosed(RunError):
    """Another thread has closed the pool, as at the end of a run: no failure of a reward."""


class Worker:
    """One process, with at most one item under way. variables: names of environment variables, besides PASSED_ON."""

    def __init__(self, function: str, variables: Collection[str]) -> None:
        # -P and PYTHONPATH: the user's folder may hold a random.py, and may not be where this package is
        command = [sys.executable, "-P", "-m", "grpocli.rewards.pool_worker", function]
        path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        seen = {name: value for name, value in os.environ.items() if name in variables or PASSED_ON.fullmatch(name)}
        env = {**seen, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        # what libraries say would tear the live view; errors come back as answers
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )
        self.item: int | None = None
        self.ready = False
        self.timeout = START_SECONDS
        self.deadline = time.monotonic() + self.timeout
        self._buffer = b""

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, index: int, item: Any, timeout: float) -> None:
        assert self.process.stdin is not None
        self.item, self.timeout, self.deadline = index, timeout, time.monotonic() + timeout
        self.process.stdin.write(json.dumps(item).encode() + b"\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """The next answer: a list [result] or [null, reason]; None while half of it has come; EOFError at the end."""
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
            with contextlib.suppress(BrokenPipeError):  # what was not yet written is lost with the worker
                stream.close()


@dataclass
class Batch:
    """The items of one `Pool.map`: as JSON, their results so far (None: not yet), and those not yet given to a worker.

    retried: whose first worker has died. overruns: how many took too long.
    """

    keys: list[str]
    results: list[Any]
    retried: set[int] = field(default_factory=set)
    overruns: int = 0

    def __post_init__(self) -> None:
        self.waiting = deque(i for i, result in enumerate(self.results) if result is None)


class Pool:
    """Workers that live as long as the pool; started by `start` or at the first use.

    variables: names of further environment variables that they need, besides PASSED_ON.
    """

    def __init__(self, function: str, workers: int, timeout: float, variables: Collection[str] = ()) -> None:
        self.function, self.size, self.timeout, self.variables = function, workers, timeout, variables
        self._workers: list[Worker] = []
        self._overruns: dict[str, Overrun] = {}
        self._closed = False
        self._mapping = threading.RLock()
        self._starter = ThreadPoolExecutor(1, "pool")  # a worker ends with the thread that has started it

    def map(self, items: Sequence[Any]) -> list[Any]:
        """What the function returns, never None, or a Failure for each item (JSON values all), in order.

        An Overrun is the failure of an item that took too long, now or in an earlier call, or that its worker process
        crashed on. Too long is `timeout`; after FULL_OVERRUNS such items in one call it is a tenth of that. An item
        whose worker dies is tried once more; a Failure, no Overrun, where somebody else ends the second one, too.

        Raises RunError if no worker starts, PoolClosed if another thread closes the pool.
        """
        with self._mapping:
            self._closed = False
            try:
                return self._map(items)
            except BaseException:
                self.close()  # an answer still under way must not be taken for one of the next call's
                raise

    def _map(self, items: Sequence[Any]) -> list[Any]:
        keys = [json.dumps(item) for item in items]
        batch = Batch(keys, [self._overruns.get(key) for key in keys])
        while any(result is None for result in batch.results):
            if self._closed:
                raise self._ended()
            self._fill(min(self.size, len(items)))
            for worker in self._workers:
                if worker.ready and worker.item is None and batch.waiting:
                    index = batch.waiting.popleft()
                    share = SHORT if batch.overruns >= FULL_OVERRUNS else 1.0
                    with contextlib.suppress(BrokenPipeError):  # it has died: reading from it will say so
                        worker.give(index, items[index], self.timeout * share)
            self._listen(batch)
        return batch.results

    def start(self) -> None:
        """Start the workers without waiting for them: what they import takes seconds."""
        self._fill(self.size)

    def _fill(self, n: int) -> None:
        """Start the workers that are missing, or that ended while they had nothing to do."""
        for worker in [w for w in self._workers if w.ready and w.item is None]:
            if worker.process.poll() is not None:
                worker.kill()
                self._workers.remove(worker)
        while len(self._workers) < n:
            self._workers.append(self._starter.submit(Worker, self.function, self.variables).result())

    def _listen(self, batch: Batch) -> None:
        """Wait for answers until the first deadline; end the workers that have missed theirs."""
        busy = [w for w in self._workers if w.item is not None or not w.ready]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker, selectors.EVENT_READ)
            patience = max(0.0, min(w.deadline for w in busy) - time.monotonic())
            answered = [key.fileobj for key, _ in selector.select(patience)]
        for worker in busy:
            if worker in answered:
                self._take(worker, batch)
            elif time.monotonic() >= worker.deadline:
                self._lose(worker, f"it took longer than {worker.timeout:g} s")
                self._overrun(worker, batch, Overrun(f"it took longer than {worker.timeout:g} s"))

    def _take(self, worker: Worker, batch: Batch) -> None:
        try:
            answer = worker.read()
        except EOFError:
            self._lose(worker, "its worker process died")
            self._died(worker, batch)
            return
        if answer is None:
            return
        if not worker.ready:
            if answer != READY:
                self._lose(worker, answer[1])
            worker.ready = True
            return
        assert worker.item is not None
        batch.results[worker.item] = Failure(answer[1]) if answer[0] is None else answer[0]
        worker.item = None

    def _ended(self) -> PoolClosed:
        return PoolClosed(f"{self.function} was ended while it scored")

    def _lose(self, worker: Worker, reason: str) -> None:
        """End a worker. Raises RunError if it has not started, PoolClosed if another thread has ended it."""
        worker.kill()
        self._workers.remove(worker)
        if self._closed:
            raise self._ended()
        if worker.item is None:
            raise RunError(f"a worker process for {self.function} did not start: {reason}")

    def _died(self, worker: Worker, batch: Batch) -> None:
        """The item of a worker that has died is tried once more."""
        assert worker.item is not None
        if worker.item not in batch.retried:
            batch.retried.add(worker.item)
            batch.waiting.append(worker.item)
        elif worker.process.returncode in OUTSIDE:
            batch.results[worker.item] = Failure("its worker process was killed twice")
        else:
            self._overrun(worker, batch, Overrun("its worker process died", late=False))

    def _overrun(self, worker: Worker, batch: Batch, overrun: Overrun) -> None:
        """Note the overrun of a worker's item; one of the whole timeout also for later calls."""
        assert worker.item is not None
        batch.results[worker.item] = overrun
        batch.overruns += 1
        if worker.timeout >= self.timeout and len(self._overruns) < REMEMBERED:
            self._overruns[batch.keys[worker.item]] = overrun

    def close(self) -> None:
        """End the workers. A `map` of another thread finds them dead, and ends."""
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
    """One for each core that this process may use, shared with the other trainer processes here; at most eight."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // processes))
