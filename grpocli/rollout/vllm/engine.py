"""engine=vllm in a trainer process: requests to the servers, syncs of weights, and lost servers brought back."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

import torch

from grpocli.errors import EngineError, EngineGone
from grpocli.http import retry_delay
from grpocli.rollout.engine import Engine, Listener, ignore_group
from grpocli.rollout.sampling import stop_token_ids
from grpocli.rollout.vllm.client import ServerClient, body, check_refusal, check_temperature, completions
from grpocli.rollout.vllm.connection import KeepsRefusing, Refused
from grpocli.rollout.vllm.lora import AdapterSync
from grpocli.rollout.vllm.server_files import Endpoint, run_files
from grpocli.rollout.vllm.server_pool import Choices, CompletionCounter, ServerPool
from grpocli.rollout.vllm.supervisor import ExternalServers, OwnServers, Reconnector
from grpocli.rollout.vllm.transport_gpu import IpcTransport, NcclTransport
from grpocli.rollout.vllm.transport_shm import ShmTransport
from grpocli.rollout.vllm.weight_sync import PolicyWeights, Transport, WeightSync
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineContext, OnGroup
    from grpocli.rollout.vllm.config import VllmOptions

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.5  # longest wait before the second attempt, in seconds
ATTEMPTS = 10  # of one sync or one batch of completions, in case a server dies every time


Synchronizer = WeightSync | AdapterSync


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
        self._gone: str | None = None  # the reason why no server will come back
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
        except Refused as refused:
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
        """Send the requests without `results`, in rounds, until every process has all its results."""
        for _ in range(ATTEMPTS):
            left = [k for k in range(len(bodies)) if k not in results]

            def arrived(i: int, choices: Choices, left: Sequence[int] = left) -> None:
                answered(left[i], choices)

            self.pool.complete([bodies[k] for k in left], arrived, counter)
            if self._failure:
                raise _copy(self._failure)
            unanswered = any(k not in results for k in left) and not counter.watch.cancelled()
            reasons = list(self.pool.lost.values()) or ["a vLLM server died"]
            problems = self.world.gather_objects(reasons[:1] if unanswered else [])
            if not problems:
                return
            self.recover()
        raise EngineGone(f"{problems[0]}; gave up after {ATTEMPTS} attempts at one batch of completions")

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
        for attempt in range(1, ATTEMPTS + 1):
            self._bring_back()
            try:
                return self._synchronizer(version)
            except EngineError as error:
                if not self._lost():
                    raise
                last = error
            time.sleep(retry_delay(attempt, FIRST_DELAY))  # the server may be busy
        raise EngineGone(f"{ATTEMPTS} syncs of weights failed one after the other: {last}")

    def _lost(self) -> dict[int, str]:
        """Reasons why servers are lost, by number, over all processes. Collective."""
        found = self.world.gather_objects(list(self.pool.lost.items()))
        return dict(sorted(found, reverse=True))

    def _bring_back(self) -> None:
        """Wait for lost servers, or others in their place, and use them. Collective."""
        if self._gone:  # an earlier wait has failed
            raise EngineGone(self._gone)
        if self.world.is_main:
            self._reconnector.check(self.pool.clients)
        lost = self._lost()
        if not lost:
            return
        refusing = [str(client.lost) for client in self.pool.clients if isinstance(client.lost, KeepsRefusing)]
        if refusing := self.world.gather_objects(refusing):
            self._gone = refusing[0]
            raise EngineGone(self._gone)
        found = self.world.broadcast_object(self._wait(lost) if self.world.is_main else "")
        if isinstance(found, str):
            self._gone = found
            raise EngineGone(found)
        for index, endpoint in zip(lost, found, strict=True):
            self.pool.replace(index, endpoint)
            self.restarts += 1
            logger.warning("vLLM server %d is back, at %s", index, endpoint.url)

    def _wait(self, lost: dict[int, str]) -> list[Endpoint] | str:
        """The new endpoints, or the reason why there are none; in the main process only."""
        for index, reason in lost.items():
            logger.warning("vLLM server %d is lost: %s", index, reason)
        try:
            return self._reconnector.wait({i: (self.pool.clients[i].endpoint, reason) for i, reason in lost.items()})
        except (EngineGone, OSError) as error:  # returned, because the other processes wait for the broadcast
            return str(error)

    def close(self) -> None:
        self._synchronizer.close()


def _copy(error: EngineError) -> EngineError:
    """A copy to raise in another thread."""
    return EngineGone(str(error)) if isinstance(error, EngineGone) else EngineError(str(error))


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


def make_synchronizer(clients: Sequence[ServerClient], context: EngineContext) -> Synchronizer:
    """The synchronizer of the run: an adapter's for LoRA, else one of all weights through the run's transport."""
    job = context.job
    if job.lora_rank:
        return AdapterSync(clients, context)
    weights = PolicyWeights(context.policy, getattr(torch, job.dtype))
    bucket_bytes = context.sync.bucket_mb * 2**20

    def make_transport() -> Transport:
        if job.transport == "shm":
            return ShmTransport(weights, bucket_bytes)
        if job.transport == "nccl":
            return NcclTransport(weights, bucket_bytes)
        return IpcTransport(weights, bucket_bytes, context.world.rank)

    return WeightSync(clients, context, make_transport)
