"""Bring servers to the trainer's weights, and prove that they have them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from grpocli.errors import EngineError
from grpocli.rollout.vllm.probe import Probe
from grpocli.rollout.vllm.transport import Transport, Weights, each

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext
    from grpocli.rollout.vllm.protocol import Server


class WeightSync:
    """Called with a version by every trainer process; the main one sends and verifies, all of them fail together.

    Requests that run are awaited first, or with `context.in_flight` held and resumed: vLLM drops what they computed
    with the old weights, and computes it again with the new ones before their next token.

    Where an update has failed, servers may have a mixture of weights: they stay paused, and hold requests, until a
    sync succeeds or `release`.
    """

    def __init__(self, servers: Sequence[Server], context: EngineContext) -> None:
        self.servers, self.policy, self.world = list(servers), context.policy, context.world
        self.mode = "keep" if context.in_flight else "wait"
        self.probe = Probe(context)
        self.weights = Weights(self.policy, getattr(torch, context.job.dtype))
        self.transport = transport_of(context, self.weights)

    def __call__(self, version: int) -> dict[str, float]:
        """Raises EngineError in every process if the weights cannot be sent or proven. `sync/seconds/probe` is 0
        where no probe was due."""
        began = time.perf_counter()
        main = self.world.is_main
        probing = main and self.probe.due(new=not all(server.prepared for server in self.servers))
        sent, failure = 0, ""
        weights = OneAtATime(self.weights.stream())
        try:
            if main or self.transport.everywhere:
                sent = self._update(weights, version) if main else self.transport.send([], weights, version)
        except EngineError as error:
            failure = str(error)
        if self.world.size > 1 and self.weights.sharded:
            for _ in weights:  # gathers are collective: also after a failure, and where nothing is sent
                pass
        sent, failure, probing = self.world.broadcast_object((sent, failure, probing))
        updated = time.perf_counter()
        if not failure and probing:
            failure = self.world.broadcast_object(self._probe(version))
        if failure:
            raise EngineError(failure)
        seconds = {"sync/seconds/update": updated - began, "sync/seconds/probe": time.perf_counter() - updated}
        return {"sync/bytes": float(sent), **seconds}

    def release(self) -> None:
        """After a sync that failed and is not tried again: let the servers that are left go on, with any weights."""
        if self.world.is_main:
            for server in self.servers:
                with suppress(EngineError):  # it is going away; why the sync failed is told already
                    if not server.lost:
                        server.abandon_update()
                        server.resume()

    def close(self) -> None:
        self.transport.close()

    def _update(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Hold requests, replace the weights, forget what was computed with the old ones, go on; the bytes sent."""
        each(self.servers, lambda server: server.weight_version())  # raises where another run has changed them
        each(self.servers, lambda server: server.pause(self.mode))
        sent = self.transport.send(self.servers, weights, version)
        each(self.servers, lambda server: server.reset_prefix_cache(running=self.mode == "keep"))
        each(self.servers, lambda server: compare_versions(server, version))
        each(self.servers, lambda server: server.resume())
        return sent

    def _probe(self, version: int) -> str:
        """What is wrong, in the main process. A sharded policy scores in all processes or in none."""
        if not self.world.is_main:
            if self.weights.sharded:
                self.policy.score(self.probe.token_ids)
            return ""
        try:
            self.probe.check(self.servers, version, beside_requests=self.mode == "keep")
        except EngineError as error:
            return str(error)
        return ""


class OneAtATime:
    """An iterator that two threads may walk through together: a transfer that is given up may still be in a gather,
    whose rest the main thread makes with the other processes."""

    def __init__(self, items: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._lock:
            return next(self._items)


def compare_versions(server: Server, version: int) -> None:
    """Raise EngineError unless the server says that its weights are those of `version`."""
    echoed = server.weight_version()
    if echoed != version:
        raise EngineError(
            f"after a sync the vLLM server at {server.endpoint.url} has weight version {echoed}, the trainer {version}"
        )


def transport_of(context: EngineContext, weights: Weights) -> Transport:
    """The run's transport, as `sync=` and the machine say."""
    size = context.sync.bucket_mb * 2**20
    if context.job.transport == "shm":
        from grpocli.rollout.vllm.transport_shm import ShmTransport

        return ShmTransport(weights, size)
    from grpocli.rollout.vllm import transport_gpu

    if context.job.transport == "nccl":
        return transport_gpu.NcclTransport(weights, size)
    return transport_gpu.IpcTransport(weights, size, context.world.rank)
