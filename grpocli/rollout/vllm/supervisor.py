"""Restart: a lost server is started again or waited for, and trainer processes continue with the server in its place.

The process that launched the run supervises its servers (`SupervisedServer`). Trainer processes wait for a lost server
(`OwnServers`, or `ExternalServers` for `engine.base_url`). They communicate through files in the run folder: a trainer
reports a lost server in `lost_N`, and the address of the next one appears in `endpoint_N.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpocli.errors import ConfigError, EngineError, EngineGone
from grpocli.files import read_shared, write_atomic
from grpocli.rollout.vllm.external_server import external_servers
from grpocli.rollout.vllm.server_files import Endpoint, lost_file, run_file

if TYPE_CHECKING:
    from grpocli.processes.guard import Guarded
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.client import ServerClient
    from grpocli.rollout.vllm.config import VllmOptions

logger = logging.getLogger(__name__)

GRACE = 2.0  # seconds that a lost server has to exit
POLL = 0.2  # seconds between checks of processes and files

StartServer = Callable[[int], AbstractContextManager[tuple[Endpoint, "Guarded"]]]
Lost = Mapping[int, tuple[Endpoint, str]]
"""The former endpoint of each lost server, by number, and the reason why it is lost."""


class SupervisedServer:
    """Number `index` of the run's own servers, restarted in a thread of the launching process when it is lost.

    start_server: starts a server as a context; its argument is `attempts`. stop_event: set when the run ends.
    max_restarts: the largest number of attempts. attempts: restarts tried so far, failed ones included.
    """

    def __init__(
        self, index: int, run_dir: Path, start_server: StartServer, stop_event: threading.Event, max_restarts: int
    ) -> None:
        self.index, self.run_dir, self.stop_event, self.max_restarts = index, run_dir, stop_event, max_restarts
        self.name = f"vLLM server {index}"
        self._start_server = start_server
        self._running = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._supervise, name=self.name, daemon=True)
        self.attempts = 0

    def start(self) -> None:
        """Return when the server is healthy and its endpoint file written. Raises ConfigError or EngineError."""
        self.endpoint, self.process = self._running.enter_context(self._start_server(self.attempts))
        self.endpoint = dataclasses.replace(self.endpoint, generation=self.attempts)
        self.endpoint.save(run_file(self.run_dir, self.index))

    def supervise(self) -> None:
        """Restart the server when it is lost, in a thread, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End the server; `stop_event` must be set."""
        if self._thread.ident is not None:
            self._thread.join()
        self._running.close()
        for path in (run_file(self.run_dir, self.index), lost_file(self.run_dir, self.index)):
            path.unlink(missing_ok=True)

    def _supervise(self) -> None:
        while not self.stop_event.wait(POLL):
            if (reason := self._failure()) and not self._restart(reason):
                return

    def _failure(self) -> str | None:
        """The reason why the server is lost: its process has ended, or a trainer reports it."""
        if (code := self.process.poll()) is not None:
            return f"{self.name} ended with exit code {code}{self.endpoint.cause()}"
        try:
            generation, _, reason = read_shared(lost_file(self.run_dir, self.index)).partition(" ")
        except FileNotFoundError:
            return None
        return reason if int(generation) == self.attempts else None

    def _restart(self, reason: str) -> bool:
        """Start another server, as often as `max_restarts` allows; whether one runs."""
        while self.attempts < self.max_restarts and not self.stop_event.is_set():
            logger.warning("%s; starting another, number %d of %d", reason, self.attempts + 1, self.max_restarts)
            self.attempts += 1
            try:
                self.process.stop(GRACE)
                self._running.close()
                self.start()
                return True
            except Exception as error:  # noqa: BLE001 - every failure is reported to the trainer, which waits for a server
                reason = str(error)
        if not self.stop_event.is_set():
            problem = f"{reason}; it was started again {self.attempts} times (engine.max_restarts={self.max_restarts})"
            logger.error("%s", problem)
            dataclasses.replace(self.endpoint, gone=problem).save(run_file(self.run_dir, self.index))
        return False


class Reconnector(Protocol):
    """Finds lost servers again. Made in every trainer process, called in the main one."""

    def check(self, clients: Sequence[ServerClient]) -> None:
        """Before a sync, mark clients as lost whose server was replaced unnoticed."""
        ...

    def wait(self, lost: Lost) -> list[Endpoint]:
        """The new endpoints of the lost servers, in the given order.

        All of them share one deadline, because the other processes wait in a collective call. Raises EngineGone at the
        deadline, if no server will come, or if the run is asked to stop.
        """
        ...


class OwnServers:
    """Waits for the run's own servers, which `SupervisedServer` starts again in the launching process."""

    def __init__(self, options: VllmOptions, job: EngineJob, stopping: Callable[[], bool]) -> None:
        self.options, self.job, self.stopping = options, job, stopping

    def check(self, clients: Sequence[ServerClient]) -> None:
        """Do nothing: a new server has a new address, so the next call to a dead one fails."""

    def wait(self, lost: Lost) -> list[Endpoint]:
        timeout = max(self.options.waits.values())
        for index, (former, reason) in lost.items():
            write_atomic(lost_file(self.job.run_dir, index), f"{former.generation} {reason}")
        deadline = time.monotonic() + timeout
        return [self._wait(index, former, reason, timeout, deadline) for index, (former, reason) in lost.items()]

    def _wait(self, index: int, former: Endpoint, reason: str, timeout: float, deadline: float) -> Endpoint:
        while time.monotonic() < deadline:
            try:
                endpoint = Endpoint.load(run_file(self.job.run_dir, index))
            except FileNotFoundError as error:
                raise EngineGone(f"{reason}; the run is being ended, so no other server is started") from error
            if endpoint.gone:
                raise EngineGone(endpoint.gone)
            if endpoint.generation > former.generation:
                return endpoint
            _raise_if_stopping(reason, self.stopping)
            time.sleep(POLL)
        raise EngineGone(
            f"{reason}; no other server came in its place within {timeout:g} s "
            f"(engine.start_timeout={self.options.start_timeout}, engine.max_restarts={self.options.max_restarts})"
        )


class ExternalServers:
    """Waits for servers at `engine.base_url`, which may come back with another key and other weights."""

    def __init__(self, options: VllmOptions, job: EngineJob, stopping: Callable[[], bool]) -> None:
        self.options, self.job, self.stopping = options, job, stopping

    def check(self, clients: Sequence[ServerClient]) -> None:
        for client in clients:
            with contextlib.suppress(EngineError):  # the sync that follows raises the same error
                if not client.lost:
                    client.weight_version()

    def wait(self, lost: Lost) -> list[Endpoint]:
        deadline = time.monotonic() + self.options.reconnect_timeout
        return [self._wait(index, reason, deadline) for index, (_, reason) in lost.items()]

    def _wait(self, index: int, reason: str, deadline: float) -> Endpoint:
        url, timeout = self.options.urls[index], self.options.reconnect_timeout
        while True:
            _raise_if_stopping(reason, self.stopping)  # also if the server answers here, and hangs in each sync
            left = max(1, math.ceil(deadline - time.monotonic()))
            only_this = dataclasses.replace(
                self.options,
                base_url=url,
                api_key_file=self.options.key_file(url),
                request_timeout=min(left, self.options.request_timeout),
                patience=min(left, self.options.patience),
            )
            try:
                return external_servers(only_this, self.job)[0]
            except (ConfigError, EngineError) as error:
                problem = error
            if time.monotonic() > deadline:
                raise EngineGone(
                    f"{reason}; it did not come back within {timeout} s (engine.reconnect_timeout): {problem}"
                ) from problem
            time.sleep(POLL)


def _raise_if_stopping(reason: str, stopping: Callable[[], bool]) -> None:
    """Raise EngineGone if the run is asked to stop."""
    if stopping():
        raise EngineGone(f"{reason}; the run was asked to stop, so it does not wait for another server")
