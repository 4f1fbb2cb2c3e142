"""engine=vllm in a trainer process: requests to the servers, syncs of weights, and lost servers brought back.

`ServerPool` spreads requests over the servers by load. `VllmEngine` repeats what a lost server left undone, after the
supervisor has replaced it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import resource
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import EngineError, EngineGone
from grpocli.progress import UNWATCHED, Watch, unreported
from grpocli.rollout.engine import Engine, Listener, ignore_group
from grpocli.rollout.sampling import stop_token_ids
from grpocli.rollout.vllm.client import (
    CHECK,
    RequestRefused,
    ServerClient,
    ServerGone,
    body,
    check_refusal,
    check_temperature,
    completions,
)
from grpocli.rollout.vllm.lora import AdapterSync
from grpocli.rollout.vllm.server_files import Endpoint, run_files
from grpocli.rollout.vllm.supervisor import ExternalServers, OwnServers, Reconnector
from grpocli.rollout.vllm.transports import IpcTransport, NcclTransport, ShmTransport
from grpocli.rollout.vllm.weight_sync import PolicyWeights, Transport, WeightSync, together
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineContext, OnGroup
    from grpocli.rollout.vllm.config import VllmOptions

logger = logging.getLogger(__name__)

SEQUENCES = 1024
"""Completions at a server at a time: as many as vLLM runs at once on a large GPU; a smaller server queues the rest."""
REQUESTS = 256
"""Requests at a server at a time, since each has its own connection."""
ATTEMPTS = 5
"""Replacements in a row that complete no batch, after which the run ends: a server may die of a request every time."""

Choices = list[dict[str, Any]]
"""The completions of one request, as vLLM's JSON."""
Synchronizer = WeightSync | AdapterSync


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


def completions_of(body: dict[str, Any]) -> int:
    """The number of completions that a request asks for."""
    return int(body.get("sampling_params", {}).get("n", 1))


class ServerPool:
    """The servers of a run in one trainer process. Several threads may call it."""

    def __init__(self, clients: list[ServerClient]) -> None:
        """clients: changed when a server is replaced; the syncs hold the same list."""
        self.clients = clients
        self._closed: set[int] = set()  # replaced, and without the weights to sample with
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 1024 + REQUESTS * len(self.clients)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    @property
    def lost(self) -> dict[int, str]:
        """Reasons why servers are lost (gone, stuck or replaced), by number."""
        return {index: str(client.lost) for index, client in enumerate(self.clients) if client.lost}

    def replace(self, index: int, endpoint: Endpoint) -> None:
        """Use the server at `endpoint` as number `index`. It gets no requests before `open_all`."""
        self._closed.add(index)
        self.clients[index] = self.clients[index].replaced_by(endpoint)

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
        # the largest requests hold at most SEQUENCES completions together
        limit = max(1, min(REQUESTS, SEQUENCES // max(map(completions_of, bodies))))
        rooms = [asyncio.Semaphore(limit) for _ in self.clients]
        outstanding = [0] * len(rooms)  # completions that were requested and have not arrived
        turn = asyncio.Semaphore(limit * len(rooms))  # a request chooses its server only when it can run

        async def ask(index: int, body: dict[str, Any]) -> Choices | None:
            """The completions; None if the server was lost or replaced before it answered."""
            outstanding[index] += completions_of(body)
            try:
                async with rooms[index]:
                    return await self.clients[index].generate(body) if self.takes_requests(index) else None
            except ServerGone:
                return None
            finally:
                outstanding[index] -= completions_of(body)

        async def one(number: int, body: dict[str, Any]) -> Choices | None:
            async with turn:
                while living := [index for index in range(len(rooms)) if self.takes_requests(index)]:
                    choices = await ask(min(living, key=outstanding.__getitem__), body)
                    if choices is not None:
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
            await asyncio.sleep(CHECK / 10)
            if count.watch.cancelled():
                for task in tasks:
                    task.cancel()
            if count.watch.progress is not unreported:
                now = sum(await asyncio.gather(*(client.generated() for client in self.clients)))
                first = now if first is None else first
                count.tokens = max(count.tokens, now - first)
                count.report()


class VllmEngine(Engine):
    """The engine of `engine=vllm`; `connect` makes it.

    recover: called when requests are unanswered and every server is lost, equally often in every process. Default: sync
    in this thread. With prefetch, `training/build_trainer.py` passes a function that syncs in the main thread.
    """

    def __init__(
        self,
        pool: ServerPool,
        synchronizer: Synchronizer,
        stop: Sequence[int],
        *,
        version: int | None,
        world: World,
        reconnector: Reconnector,
        recover: Callable[[], None] | None = None,
    ) -> None:
        """version: of the servers' weights; None before the first sync to servers that may have any."""
        self.pool, self._synchronizer, self._stop, self.version = pool, synchronizer, list(stop), version
        self.world, self._reconnector = world, reconnector
        self.recover: Callable[[], None] = recover or self._sync_again
        self.restarts = 0  # servers that came back
        self._synced = False
        self._in_vain = 0  # replacements since the last complete batch
        self._failure: EngineError | None = None  # of the last sync: servers may have any weights

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order; the answers of a server that dies later are kept.

        Collective. Raises EngineError if a request fails, EngineGone if a lost server does not come back in time.
        """
        if self.version is None:
            raise EngineError("a vLLM server may have any weights: sync before the first completion")
        check_temperature(sampling)
        version, synced = self.version, self._synced  # read first, because a sync may come meanwhile
        bodies = [body(request, sampling, self._stop) for request in requests]
        results: dict[int, list[Completion]] = {}
        listener = Listener.wrap(on_group)
        counter = CompletionCounter(listener.watch, sum(request.n for request in requests))

        def answered(k: int, choices: Choices) -> None:
            if self._failure:  # after a failed sync they may come from any weights
                return
            results[k] = completions(choices, requests[k], sampling, version, synced=synced)
            counter.add(len(results[k]))
            listener(k, results[k])

        try:
            self._complete(bodies, results, answered, counter)
        except RequestRefused as refused:
            check_refusal(refused, sampling)
            raise
        return [results.get(k, []) for k in range(len(requests))]  # none is missing unless it was cancelled

    def _complete(
        self,
        bodies: Sequence[dict[str, object]],
        results: Container[int],
        answered: Callable[[int, Choices], None],
        counter: CompletionCounter,
    ) -> None:
        """Send the requests without `results`, until every process has all its results."""
        while True:
            left = [k for k in range(len(bodies)) if k not in results]

            def arrived(i: int, choices: Choices, left: Sequence[int] = left) -> None:
                answered(left[i], choices)

            self.pool.complete([bodies[k] for k in left], arrived, counter)
            if self._failure:
                raise type(self._failure)(str(self._failure))  # a copy, as this may be another thread
            unanswered = any(k not in results for k in left) and not counter.watch.cancelled()
            if not any(self.world.gather_objects([unanswered])):
                self._in_vain = 0
                return
            self.recover()

    def _sync_again(self) -> None:
        assert self.version is not None
        self.sync(self.version)

    def sync(self, version: int) -> dict[str, float]:
        """Bring every server to the policy's current weights and verify it, after lost servers have come back.

        Collective. Raises EngineGone in every process if a lost server does not come back.
        """
        try:
            metrics = self._sync_all(version)
        except EngineError as error:
            self._failure = error  # first, because answers after `release` may come from a mixture of weights
            self._synchronizer.release()
            raise
        self.version, self._synced, self._failure = version, True, None
        self.pool.open_all()
        return metrics | {"engine/restarts": float(self.restarts)}

    def _sync_all(self, version: int) -> dict[str, float]:
        """Sync until no server dies meanwhile; the others hold their requests between attempts."""
        while True:
            self._bring_back()
            try:
                return self._synchronizer(version)
            except EngineError:
                if not self._lost():
                    raise
            time.sleep(CHECK / 10)  # the server may be busy

    def _lost(self) -> dict[int, str]:
        """Reasons why servers are lost, by number, over all processes. Collective."""
        found = self.world.gather_objects(list(self.pool.lost.items()))
        return dict(sorted(found, reverse=True))

    def _bring_back(self) -> None:
        """Wait for lost servers, or others in their place, and use them. Collective."""
        lost = self._lost()
        if not lost:
            return
        self._in_vain += 1
        found: list[Endpoint] = []
        with together(self.world):
            if self.world.is_main:
                for index, reason in lost.items():
                    logger.warning("vLLM server %d is lost: %s", index, reason)
                    if self._in_vain > ATTEMPTS:
                        raise EngineGone(f"{reason}; gave up after {ATTEMPTS} servers that completed no batch")
                clients = self.pool.clients
                found = self._reconnector.wait({i: (clients[i].endpoint, reason) for i, reason in lost.items()})
        for index, endpoint in zip(lost, self.world.broadcast_object(found), strict=True):
            self.pool.replace(index, endpoint)
            self.restarts += 1
            logger.warning("vLLM server %d is back, at %s", index, endpoint.url)

    def close(self) -> None:
        self._synchronizer.close()


def connect(options: VllmOptions, context: EngineContext) -> VllmEngine:
    """An engine for the servers whose endpoints `launch` wrote into the run folder.

    Raises ConfigError if vLLM does not support the run's sampling.
    """
    job = context.job
    run = hashlib.blake2b(str(job.run_dir.absolute()).encode(), digest_size=4).hexdigest()  # the same in every process
    patience = 0 if options.base_url is None else options.patience  # an own server's errors are not temporary
    clients = [
        ServerClient(Endpoint.load(path), options.request_timeout, run, patience) for path in run_files(job.run_dir)
    ]
    reconnector = OwnServers if options.base_url is None else ExternalServers
    if context.sampling:
        check_temperature(context.sampling)
    return VllmEngine(
        ServerPool(clients),
        make_synchronizer(clients, context),
        stop_token_ids(context.policy.model, context.tokenizer),
        version=0 if options.base_url is None and not job.dummy else None,
        world=context.world,
        reconnector=reconnector(options, job, context.stopping),
        recover=context.recover,
    )


def make_synchronizer(clients: list[ServerClient], context: EngineContext) -> Synchronizer:
    """The synchronizer of the run: an adapter's for LoRA, else one of all weights through the run's transport."""
    job = context.job
    if job.lora_rank:
        return AdapterSync(clients, context)
    weights, bucket_bytes = PolicyWeights(context.policy, getattr(torch, job.dtype)), context.sync.bucket_mb * 2**20
    transport: Transport = ShmTransport(weights, bucket_bytes)
    if job.transport == "nccl":
        transport = NcclTransport(weights, bucket_bytes)
    elif job.transport == "ipc":
        transport = IpcTransport(weights, bucket_bytes, context.world.rank)
    return WeightSync(clients, context, transport)
