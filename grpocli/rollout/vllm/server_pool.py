"""Spread requests over the servers of a run by load; a dead server's unanswered requests go to the others."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpocli.progress import UNWATCHED, Watch, unreported
from grpocli.rollout.vllm.client import ServerClient
from grpocli.rollout.vllm.connection import ServerGone
from grpocli.rollout.vllm.server_files import Endpoint

SEQUENCES = 1024
"""Completions at a server at a time: as many as vLLM runs at once on a large GPU; a smaller server queues the rest."""
REQUESTS = 256
"""Requests at a server at a time, since each has its own connection."""
POLL = 0.5  # seconds between checks of the watch and at the counts of tokens

Choices = list[dict[str, Any]]
"""The completions of one request, as vLLM's JSON."""


@dataclass(slots=True)
class CompletionCounter:
    """Reports the completions out of `total` that are done, and the tokens generated, to `watch`."""

    watch: Watch = UNWATCHED
    total: int = 0
    done: int = 0
    tokens: float = 0.0

    def add(self, completions: int) -> None:
        self.done += completions
        self.report()

    def report(self) -> None:
        self.watch.progress(self.done, self.total, "completions", f"{self.tokens:,.0f} tokens" if self.tokens else "")


@dataclass(slots=True)
class ServerLoad:
    """One server and its load during one call of `complete`.

    takes_requests: see `ServerPool.takes_requests`. outstanding: completions that were requested and have not arrived.
    """

    client: ServerClient
    takes_requests: Callable[[], bool]
    room: asyncio.Semaphore
    outstanding: int = 0

    async def request(self, body: dict[str, Any]) -> Choices | None:
        """The completions; None if the server was lost or replaced before it answered."""
        wanted = completions_of(body)
        self.outstanding += wanted
        try:
            async with self.room:
                return await self.client.generate(body) if self.takes_requests() else None
        except ServerGone:
            return None
        finally:
            self.outstanding -= wanted


def completions_of(body: dict[str, Any]) -> int:
    """The number of completions that a request asks for."""
    return int(body.get("sampling_params", {}).get("n", 1))


def requests_at_once(bodies: Sequence[dict[str, Any]]) -> int:
    """Requests at a server at a time, so that the largest ones hold at most SEQUENCES completions together."""
    return max(1, min(REQUESTS, SEQUENCES // max(map(completions_of, bodies))))


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files, often 1,024, to at least `count` where the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ServerPool:
    """The servers of a run in one trainer process. Several threads may call it."""

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self.clients = list(clients)
        allow_open_files(1024 + REQUESTS * len(self.clients))
        self._closed: set[int] = set()

    @property
    def lost(self) -> dict[int, str]:
        """Reasons why servers are lost (gone, stuck or replaced), by number."""
        return {index: str(client.lost) for index, client in enumerate(self.clients) if client.lost}

    def replace(self, index: int, endpoint: Endpoint) -> None:
        """Use the server at `endpoint` as number `index`. It gets no requests before `open_all`."""
        self._closed.add(index)
        self.clients[index].connect(endpoint)

    def open_all(self) -> None:
        """Let all servers take requests: they have the weights to sample with."""
        self._closed.clear()

    def takes_requests(self, index: int) -> bool:
        """Whether server number `index` takes requests."""
        return not self.clients[index].lost and index not in self._closed

    def complete(
        self,
        bodies: Sequence[dict[str, Any]],
        on_answer: Callable[[int, Choices], None] | None = None,
        count: CompletionCounter | None = None,
    ) -> list[Choices | None]:
        """The completions of each request, in the requests' order; None if no server was left to answer it.

        on_answer: called with a request's number and its completions as soon as they arrive.
        count: counts tokens; when its watch is cancelled, all requests are aborted and get None.
        A request, a whole group, goes to the server with the fewest outstanding completions. A lost server's
        unanswered requests go to the others. A refused request raises EngineError and cancels the rest.
        """
        return asyncio.run(self._complete(bodies, on_answer, count or CompletionCounter())) if bodies else []

    async def _complete(
        self,
        bodies: Sequence[dict[str, Any]],
        on_answer: Callable[[int, Choices], None] | None,
        count: CompletionCounter,
    ) -> list[Choices | None]:
        limit = requests_at_once(bodies)
        loads = [
            ServerLoad(client, partial(self.takes_requests, i), asyncio.Semaphore(limit))
            for i, client in enumerate(self.clients)
        ]
        turn = asyncio.Semaphore(limit * len(loads))  # a request chooses its server only when it can run

        async def one(number: int, body: dict[str, Any]) -> Choices | None:
            async with turn:
                while living := [load for load in loads if load.takes_requests()]:
                    load = min(living, key=lambda load: load.outstanding)
                    if (choices := await load.request(body)) is not None:
                        if on_answer:
                            on_answer(number, choices)
                        return choices
                return None

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number, body)) for number, body in enumerate(bodies)]
                watching = group.create_task(self._watch(tasks, count))
                await asyncio.wait(tasks)
                watching.cancel()
        except ExceptionGroup as errors:  # the first error, `on_answer`'s too, has cancelled the other tasks
            raise errors.exceptions[0] from None
        return [None if task.cancelled() else task.result() for task in tasks]

    async def _watch(self, tasks: Sequence[asyncio.Task[Choices | None]], count: CompletionCounter) -> None:
        """Until cancelled, report the tokens generated, and cancel `tasks` once the watch is cancelled."""
        first: float | None = None
        while True:
            await asyncio.sleep(POLL)
            if count.watch.cancelled():
                for task in tasks:
                    task.cancel()
            if count.watch.progress is not unreported:
                now = sum(await asyncio.gather(*(client.connection.generated() for client in self.clients)))
                first = now if first is None else first
                count.tokens = max(count.tokens, now - first)
                count.report()
