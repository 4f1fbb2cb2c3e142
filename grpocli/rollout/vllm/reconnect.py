"""How a trainer process waits for a server that is gone, or for another in its place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from grpocli.errors import ConfigError, EngineError, EngineGone
from grpocli.files import write_atomic
from grpocli.rollout.vllm.client import Client
from grpocli.rollout.vllm.endpoint import Endpoint, lost_file, run_file

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import VllmOptions

POLL = 0.2  # seconds between looks

Lost = Mapping[int, tuple[Endpoint, str]]
"""By the server's number: where it was, and how it was lost."""


class Waiting(Protocol):
    """Made in every trainer process, called in the main one."""

    def look(self, clients: Sequence[Client]) -> None:
        """Find out before a sync what the last calls could not have told; marks clients as lost."""
        ...

    def wait(self, lost: Lost) -> list[Endpoint]:
        """Where the lost servers are when they are back, in the given order.

        All of them have one deadline, because the other processes wait in a collective call. Raises EngineGone if it
        is missed, no server will come, or the run is asked to stop.
        """
        ...


class Own:
    """A server of the run's own: the process that started it (`supervisor.py`) starts another and tells its address."""

    def __init__(self, options: VllmOptions, job: EngineJob, stopping: Callable[[], bool]) -> None:
        self.options, self.job, self.stopping = options, job, stopping

    def look(self, clients: Sequence[Client]) -> None:
        """A dead server is noticed when it is called: none other can be at its address."""

    def wait(self, lost: Lost) -> list[Endpoint]:
        timeout = max(self.options.waits.values())
        for index, (before, reason) in lost.items():
            write_atomic(lost_file(self.job.run_dir, index), f"{before.generation} {reason}")
        deadline = time.monotonic() + timeout
        return [self._wait(index, before, reason, timeout, deadline) for index, (before, reason) in lost.items()]

    def _wait(self, index: int, before: Endpoint, reason: str, timeout: float, deadline: float) -> Endpoint:
        while time.monotonic() < deadline:
            try:
                endpoint = Endpoint.load(run_file(self.job.run_dir, index))
            except FileNotFoundError as error:
                raise EngineGone(f"{reason}; the run is being ended, so no other comes in its place") from error
            if endpoint.gone:
                raise EngineGone(endpoint.gone)
            if endpoint.generation > before.generation:
                return endpoint
            _pause(reason, self.stopping)
        raise EngineGone(
            f"{reason}; no other came in its place within {timeout:g} s "
            f"(engine.start_timeout={self.options.start_timeout}, engine.max_restarts={self.options.max_restarts})"
        )


class Given:
    """A server at `engine.base_url`: whoever started it may do so again, perhaps with another key and other weights."""

    def __init__(self, options: VllmOptions, job: EngineJob, stopping: Callable[[], bool]) -> None:
        self.options, self.job, self.stopping = options, job, stopping

    def look(self, clients: Sequence[Client]) -> None:
        for client in clients:
            with contextlib.suppress(EngineError):  # the sync that comes next finds the same
                if not client.lost:
                    client.weight_version()

    def wait(self, lost: Lost) -> list[Endpoint]:
        deadline = time.monotonic() + self.options.reconnect_timeout
        return [self._wait(index, reason, deadline) for index, (_, reason) in lost.items()]

    def _wait(self, index: int, reason: str, deadline: float) -> Endpoint:
        from grpocli.rollout.vllm.external_server import given_servers

        url, timeout = self.options.urls[index], self.options.reconnect_timeout
        while True:
            left = max(1, math.ceil(deadline - time.monotonic()))
            alone = dataclasses.replace(
                self.options,
                base_url=url,
                api_key_file=self.options.key_file(url),
                request_timeout=min(left, self.options.request_timeout),
                patience=min(left, self.options.patience),
            )
            try:
                return given_servers(alone, self.job)[0]
            except (ConfigError, EngineError) as error:
                problem = error
            if time.monotonic() > deadline:
                raise EngineGone(
                    f"{reason}; it did not come back within {timeout} s (engine.reconnect_timeout): {problem}"
                ) from problem
            _pause(reason, self.stopping)


def _pause(reason: str, stopping: Callable[[], bool]) -> None:
    """Between two looks."""
    if stopping():
        raise EngineGone(f"{reason}; the run was asked to stop, so no other is waited for")
    time.sleep(POLL)
