"""Requests spread over the servers of a run, by load; what a dead server leaves unanswered goes to the living ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpocli.progress import UNWATCHED, Watch, unreported
from grpocli.rollout.vllm.client import Client
from grpocli.rollout.vllm.endpoint import Endpoint
from grpocli.rollout.vllm.protocol import ServerGone

AT_ONCE = 64  # requests under way at a server; each may hold several sequences, and it queues what it cannot run
LOOK = 0.5  # seconds between looks at the watch and at the counts of tokens

Choices = list[dict[str, Any]]


@dataclass(slots=True)
class Count:
    """Reports to `watch` how many of `total` completions are done, and how many tokens have been generated."""

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
class Slot:
    """One server in one call of `complete`.

    open: whether it may be asked. outstanding: completions that it was asked for and has not sent.
    """

    client: Client
    open: Callable[[], bool]
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    outstanding: int = 0

    async def ask(self, body: dict[str, Any]) -> Choices | None:
        """None if the server was lost or replaced before it could be asked, or was lost meanwhile."""
        wanted = int(body.get("sampling_params", {}).get("n", 1))
        self.outstanding += wanted
        try:
            async with self.room:
                return await self.client.generate(body) if self.open() else None
        except ServerGone:
            return None
        finally:
            self.outstanding -= wanted


class Fleet:
    """The servers of a run, as one trainer process sees them. Calls from several threads are safe."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = list(clients)
        self._closed: set[int] = set()

    @property
    def lost(self) -> dict[int, str]:
        """How servers were found gone, stuck or replaced, by their number."""
        return {index: str(client.lost) for index, client in enumerate(self.clients) if client.lost}

    def replace(self, index: int, endpoint: Endpoint) -> None:
        """There is another server in place of number `index`. It gets no requests before `open`."""
        self._closed.add(index)
        self.clients[index].connect(endpoint)

    def open(self) -> None:
        """All servers have the weights to sample with."""
        self._closed.clear()

    def is_open(self, index: int) -> bool:
        """Whether server number `index` may be asked."""
        return not self.clients[index].lost and index not in self._closed

    def complete(
        self,
        bodies: Sequence[dict[str, Any]],
        on_answer: Callable[[int, Choices], None] | None = None,
        count: Count | None = None,
    ) -> list[Choices | None]:
        """The choices of each request, in the requests' order; None for what no server was left to answer.

        count: counts the tokens that come. Where its watch is cancelled, all requests are aborted: None for them too.
        on_answer: called with a request's number and its choices as soon as they are there.
        A request, a whole group, goes to the server with the fewest outstanding completions. What a server has not
        answered when it is lost goes to the others. A refusal is an EngineError and cancels the rest.
        """
        return asyncio.run(self._complete(bodies, on_answer, count or Count())) if bodies else []

    async def _complete(
        self, bodies: Sequence[dict[str, Any]], on_answer: Callable[[int, Choices], None] | None, count: Count
    ) -> list[Choices | None]:
        slots = [Slot(client, partial(self.is_open, i)) for i, client in enumerate(self.clients)]
        turn = asyncio.Semaphore(AT_ONCE * len(slots))  # later ones choose a server when they can run, not before

        async def one(number: int, body: dict[str, Any]) -> Choices | None:
            async with turn:
                while living := [slot for slot in slots if slot.open()]:
                    slot = min(living, key=lambda slot: slot.outstanding)
                    if (choices := await slot.ask(body)) is not None:
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
        except ExceptionGroup as errors:  # the first ends the others; also one that the caller raises at an answer
            raise errors.exceptions[0] from None
        return [None if task.cancelled() else task.result() for task in tasks]

    async def _watch(self, tasks: Sequence[asyncio.Task[Choices | None]], count: Count) -> None:
        """Cancel `tasks` once the watch is cancelled, and report the tokens that come, until cancelled itself."""
        first: float | None = None
        while True:
            await asyncio.sleep(LOOK)
            if count.watch.cancelled():
                for task in tasks:
                    task.cancel()
            if count.watch.progress is not unreported:
                now = sum(await asyncio.gather(*(client.generated() for client in self.clients)))
                first = now if first is None else first
                count.tokens = max(count.tokens, now - first)
                count.report()
