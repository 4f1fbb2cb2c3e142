"""engine=vllm in a trainer process: requests to the servers, syncs of weights, and lost servers brought back.

`ServerPool` spreads requests over the servers by load. `VllmEngine` repeats what a lost server left undone, after the
supervisor has replaced it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import EngineError, EngineGone
from grpocli.rollout.engine import Engine, Listener, ignore_group
from grpocli.rollout.sampling import stop_token_ids
from grpocli.rollout.vllm.client import CHECK, ServerClient, ServerGone, body, call_all, completions
from grpocli.rollout.vllm.lora import AdapterSync
from grpocli.rollout.vllm.server_files import Endpoint, run_files
from grpocli.rollout.vllm.supervisor import Lost, reconnect
from grpocli.rollout.vllm.transports import IpcTransport, NcclTransport, ShmTransport
from grpocli.rollout.vllm.weight_sync import PolicyWeights, Transport, WeightSync, together
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineContext, OnGroup
    from grpocli.rollout.vllm.config import VllmOptions

logger = logging.getLogger(__name__)

SEQUENCES = 1024
"""Completions for each server at a time: as many as vLLM runs at once on a large GPU; a smaller one queues the rest."""
REQUESTS = 256
"""Requests for each server at a time, since each has its own connection."""
GENERATED = "generation_tokens_total"
"""vLLM's count of the tokens that it has generated."""
ATTEMPTS = 5
"""Replacements in a row that complete no batch, after which the run ends: a server may die of a request every time."""

Choices = list[dict[str, Any]]
"""The completions of one request, as vLLM's JSON."""
OnAnswer = Callable[[int, Choices], None]
Synchronizer = WeightSync | AdapterSync


def completions_of(body: dict[str, Any]) -> int:
    """The number of completions that a request asks for."""
    return int(body.get("sampling_params", {}).get("n", 1))


@dataclass(slots=True)
class Load:
    """The requests of this process at one server."""

    completions: int = 0
    """That were requested and have not arrived."""
    changed: float = field(default_factory=time.monotonic)
    """The time of the last change of `completions`."""
    busy_before: float = 0.0
    """Seconds with any of them, until then."""

    def add(self, completions: int) -> None:
        self.busy_before, self.changed = self.busy, time.monotonic()
        self.completions += completions

    @property
    def busy(self) -> float:
        """Seconds with any of them."""
        return self.busy_before + (time.monotonic() - self.changed if self.completions else 0.0)


class ServerPool:
    """The servers of a run in one trainer process. Several threads may call it."""

    def __init__(self, clients: list[ServerClient]) -> None:
        """clients: changed when a server is replaced; the syncs hold the same list."""
        self.clients = clients
        self.loads = [Load() for _ in clients]
        self._room = asyncio.Semaphore(SEQUENCES * len(clients))
        self._turn = asyncio.Lock()  # of the request that waits for room
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="requests", daemon=True).start()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 1024 + REQUESTS * len(self.clients)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def complete(
        self,
        bodies: Mapping[int, dict[str, Any]],
        on_answer: OnAnswer,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send numbered requests until each is answered or no server is left.

        on_answer: called with a request's number and its completions as soon as they arrive.
        cancelled: once it is true, all requests are aborted.
        A request, a whole group, goes to the server with the fewest outstanding completions. A lost server's
        unanswered requests go to the others. A refused request raises EngineError and cancels the rest.
        """
        if bodies:
            asyncio.run_coroutine_threadsafe(self._complete(bodies, on_answer, cancelled), self._loop).result()

    async def _complete(
        self, bodies: Mapping[int, dict[str, Any]], on_answer: OnAnswer, cancelled: Callable[[], bool]
    ) -> None:

        async def ask(index: int, body: dict[str, Any]) -> Choices | None:
            """The completions; None if the server was lost or replaced before it answered."""
            self.loads[index].add(completions_of(body))
            try:
                return await self.clients[index].generate(body)
            except ServerGone:
                return None
            finally:
                self.loads[index].add(-completions_of(body))

        async def one(number: int, body: dict[str, Any]) -> None:
            size, taken = min(max(completions_of(body), SEQUENCES // REQUESTS), SEQUENCES), 0
            try:
                async with self._turn:  # it chooses its server only when it can run
                    while taken < size:
                        await self._room.acquire()
                        taken += 1
                while living := [index for index, client in enumerate(self.clients) if client.takes_requests]:
                    choices = await ask(min(living, key=lambda index: self.loads[index].completions), body)
                    if choices is not None:
                        return on_answer(number, choices)
            finally:
                for _ in range(taken):
                    self._room.release()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number, body)) for number, body in bodies.items()]
                while (await asyncio.wait(tasks, timeout=CHECK / 10))[1]:
                    for task in tasks if cancelled() else ():
                        task.cancel()
        except ExceptionGroup as errors:  # the first error, `on_answer`'s too, has cancelled the other tasks
            raise errors.exceptions[0] from None


@dataclass(slots=True)
class _Batch:
    """Requests and their answers so far."""

    requests: Sequence[Request]
    listener: Listener
    found: dict[int, list[Completion]] = field(default_factory=dict)

    def add(self, k: int, completions: list[Completion]) -> None:
        self.found[k] = completions
        total = sum(request.n for request in self.requests)
        self.listener.watch.progress(sum(map(len, self.found.values())), total, "completions")
        self.listener(k, completions)

    @property
    def unanswered(self) -> bool:
        return len(self.found) < len(self.requests) and not self.listener.watch.cancelled()

    @property
    def completions(self) -> list[list[Completion]]:
        """In the order of the requests; none is missing unless the batch was cancelled."""
        return [self.found.get(k, []) for k in range(len(self.requests))]


class VllmEngine(Engine):
    """The engine of `engine=vllm`; `connect` makes it."""

    def __init__(
        self,
        pool: ServerPool,
        synchronizer: Synchronizer,
        stop: Sequence[int],
        *,
        version: int | None,
        world: World,
        reconnect: Callable[[Lost], list[Endpoint]],
        vocabulary: float = math.inf,
    ) -> None:
        """version: of the servers' weights; None before the first sync to servers that may have any.

        reconnect: waits for lost servers. vocabulary: how many token ids the policy has.
        """
        self.pool, self._synchronizer, self._stop, self.version = pool, synchronizer, list(stop), version
        self.world, self._reconnect, self._vocabulary = world, reconnect, vocabulary
        self.restarts = 0  # servers that came back
        self._syncs = 0
        self._in_vain = 0  # replacements since the last complete batch
        self._failure: EngineError | None = None  # of the last sync: servers may have any weights
        self._came_back = threading.Condition()  # notified after each sync
        self._waiting = 0  # calls of `sample` that wait for it
        self._measured: dict[int, tuple[ServerClient, float, float, float]] = {}
        """At the last sync, each server with the time, its busy seconds and its tokens."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order; the answers of a server that dies later are kept.

        Collective. Raises EngineError if a request fails, EngineGone if a lost server does not come back in time.
        """
        batch = _Batch(requests, Listener.wrap(on_group))
        while True:
            self._ask(batch, sampling)
            if not any(self.world.gather_objects([batch.unanswered])):
                self._in_vain = 0
                return batch.completions
            assert self.version is not None
            self.sync(self.version)

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """As `generate`, in this process alone: where no server is left, it waits for the next sync."""
        batch = _Batch(requests, Listener.wrap(on_group))
        while True:
            syncs = self._syncs
            self._ask(batch, sampling)
            if not batch.unanswered:
                self._in_vain = 0
                return batch.completions
            with self._came_back:
                self._waiting += self._syncs == syncs
                while self._syncs == syncs and not self._failure and not batch.listener.watch.cancelled():
                    self._came_back.wait(CHECK / 10)
                self._waiting -= self._syncs == syncs  # after a sync it is 0

    @property
    def needs_sync(self) -> bool:
        return self._waiting > 0

    def _ask(self, batch: _Batch, sampling: Sampling) -> None:
        """Ask for what the batch lacks, until it is answered, cancelled, or no server is left."""
        if self.version is None:
            raise EngineError("a vLLM server may have any weights: sync before the first completion")
        version, synced = self.version, self._syncs > 0  # read first, because a sync may come meanwhile

        def answered(k: int, choices: Choices) -> None:
            if not self._failure:  # after a failed sync they may come from any weights
                newest = (self.version or 0) + 1 if synced else None  # a sync that runs may have sent the next one
                batch.add(k, completions(choices, batch.requests[k], sampling, version, newest, self._vocabulary))

        bodies = {k: body(one, sampling, self._stop) for k, one in enumerate(batch.requests) if k not in batch.found}
        self.pool.complete(bodies, answered, batch.listener.watch.cancelled)
        if self._failure:
            raise type(self._failure)(str(self._failure))  # a copy, as this may be another thread

    def sync(self, version: int) -> dict[str, float]:
        """Bring every server to the policy's current weights and verify it, after lost servers have come back.

        Collective. Raises EngineGone in every process if a lost server does not come back.
        """
        servers = self._server_metrics()
        try:
            metrics = self._sync_all(version)
        except EngineError as error:
            self._failure = error  # first, because answers after `release` may come from a mixture of weights
            self._synchronizer.release()
            raise
        self.version, self._failure = version, None
        for client in self.pool.clients:
            client.open = True
        with self._came_back:
            self._syncs, self._waiting = self._syncs + 1, 0
            self._came_back.notify_all()
        return metrics | servers | {"engine/restarts": float(self.restarts)}

    def _server_metrics(self) -> dict[str, float]:
        """What each server has done since the last sync, in the main process; see docs/metrics.md."""
        clients = self.pool.clients if self.world.is_main else []
        metrics: dict[str, float] = {}
        for number, (client, counts) in enumerate(zip(clients, call_all(clients, ServerClient.counts), strict=True)):
            if GENERATED not in counts:  # the server is lost or busy: measure over two steps next time
                continue
            now, busy, tokens = time.monotonic(), self.pool.loads[number].busy, counts[GENERATED]
            before, self._measured[number] = self._measured.get(number), (client, now, busy, tokens)
            if before and before[0] is client:
                seconds = now - before[1]
                metrics |= {
                    f"server/{number}/tokens_per_second": (tokens - before[3]) / seconds,
                    f"server/{number}/running": counts["num_requests_running"],
                    f"server/{number}/waiting": counts["num_requests_waiting"],
                    f"server/{number}/idle": max(0.0, 1 - (busy - before[2]) / seconds),
                }
        return metrics

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
        own = [(index, str(client.lost)) for index, client in enumerate(self.pool.clients) if client.lost]
        return dict(sorted(self.world.gather_objects(own), reverse=True))

    def _bring_back(self) -> None:
        """Wait for lost servers, or others in their place, and use them. Collective."""
        lost = self._lost()
        if not lost:
            return
        self._in_vain += 1
        found, clients = list[Endpoint](), self.pool.clients
        with together(self.world):
            if self.world.is_main:
                for index, reason in lost.items():
                    logger.warning("vLLM server %d is lost: %s", index, reason)
                    if self._in_vain > ATTEMPTS:
                        raise EngineGone(f"{reason}; gave up after {ATTEMPTS} servers that completed no batch")
                found = self._reconnect({i: (clients[i].endpoint, reason) for i, reason in lost.items()})
        for index, endpoint in zip(lost, self.world.broadcast_object(found), strict=True):
            clients[index] = clients[index].replaced_by(endpoint)
            self.restarts += 1
            logger.warning("vLLM server %d is back, at %s", index, endpoint.url)

    def close(self) -> None:
        self._synchronizer.close()


def connect(options: VllmOptions, context: EngineContext) -> VllmEngine:
    """An engine for the servers whose endpoints `launch` wrote into the run folder."""
    job = context.job
    run = hashlib.blake2b(str(job.run_dir.absolute()).encode(), digest_size=4).hexdigest()  # the same in every process
    patience = 0 if options.base_url is None else options.reconnect_timeout  # an own server's errors are not temporary
    clients = [
        ServerClient(Endpoint.load(path), options.request_timeout, run, patience) for path in run_files(job.run_dir)
    ]
    return VllmEngine(
        ServerPool(clients),
        make_synchronizer(clients, context),
        stop_token_ids(context.policy.model, context.tokenizer),
        version=0 if options.base_url is None and not job.dummy else None,
        world=context.world,
        reconnect=partial(reconnect, options, job, context.stopping),
        vocabulary=context.policy.model.get_input_embeddings().num_embeddings,
    )


def make_synchronizer(clients: list[ServerClient], context: EngineContext) -> Synchronizer:
    """The synchronizer of the run: an adapter's for LoRA, else one of all weights through the run's transport."""
    job = context.job
    if job.lora_rank:
        return AdapterSync(clients, context)
    weights, bucket_bytes = PolicyWeights(context.policy, getattr(torch, job.dtype)), context.sync.bucket_mb * 2**20
    ipc = partial(IpcTransport, rank=context.world.rank)
    transports: dict[str, Callable[..., Transport]] = {"shm": ShmTransport, "nccl": NcclTransport, "ipc": ipc}
    return WeightSync(clients, context, transports[job.transport](weights, bucket_bytes))
