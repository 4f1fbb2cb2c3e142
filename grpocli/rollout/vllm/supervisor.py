"""A server of the run's own, watched by the process that started it, and started again when it dies."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.files import read_shared
from grpocli.rollout.vllm.endpoint import Endpoint, lost_file, run_file

if TYPE_CHECKING:
    from grpocli.processes.guard import Guarded

logger = logging.getLogger(__name__)

GRACE = 2.0  # seconds that a lost server has to end by itself
POLL = 0.2  # seconds between looks at the process and at what the trainer reports

Start = Callable[[int], AbstractContextManager[tuple[Endpoint, "Guarded"]]]


class Watched:
    """One server after the other in one place, each told to the trainer processes by a file in the run folder.

    start: a new server as a context, given how many there have been before. over: set when none is wanted any more.
    max_restarts: how many may follow the first.
    """

    def __init__(self, index: int, run_dir: Path, start: Start, over: threading.Event, max_restarts: int) -> None:
        self.index, self.run_dir, self.over, self.max_restarts = index, run_dir, over, max_restarts
        self.name = f"vLLM server {index}"
        self._start = start
        self._running = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._watch, name=self.name, daemon=True)
        self.restarts = 0

    def start(self) -> None:
        """Return when the server is healthy and its address told. Raises ConfigError or EngineError."""
        self.endpoint, self.process = self._running.enter_context(self._start(self.restarts))
        self.endpoint = dataclasses.replace(self.endpoint, generation=self.restarts)
        self.endpoint.save(run_file(self.run_dir, self.index))

    def watch(self) -> None:
        """From now on, in a thread, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End the server; `over` must be set."""
        if self._thread.ident is not None:
            self._thread.join()
        self._running.close()
        for path in (run_file(self.run_dir, self.index), lost_file(self.run_dir, self.index)):
            path.unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self.over.wait(POLL):
            if (reason := self._trouble()) and not self._again(reason):
                return

    def _trouble(self) -> str | None:
        """Why the server is of no use any more: it has ended, or the trainer says so."""
        if (code := self.process.poll()) is not None:
            return f"{self.name} ended with exit code {code}{self.endpoint.cause()}"
        try:
            generation, _, reason = read_shared(lost_file(self.run_dir, self.index)).partition(" ")
        except FileNotFoundError:
            return None
        return reason if int(generation) == self.restarts else None

    def _again(self, reason: str) -> bool:
        """Start another, as often as that may be tried; whether there is one."""
        while self.restarts < self.max_restarts and not self.over.is_set():
            logger.warning("%s; starting another, number %d of %d", reason, self.restarts + 1, self.max_restarts)
            self.restarts += 1
            try:
                self.process.stop(GRACE)
                self._running.close()
                self.start()
                return True
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must hear that none comes
                reason = str(error)
        if not self.over.is_set():
            problem = f"{reason}; it was started again {self.restarts} times (engine.max_restarts={self.max_restarts})"
            logger.error("%s", problem)
            dataclasses.replace(self.endpoint, gone=problem).save(run_file(self.run_dir, self.index))
        return False
