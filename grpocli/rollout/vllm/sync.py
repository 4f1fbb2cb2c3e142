"""Bring servers to the trainer's weights, and prove that they have them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from grpocli.errors import EngineError
from grpocli.rollout.vllm.transport import Weights, each, transport_of

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext
    from grpocli.rollout.vllm.client import Server

PROBE_TOKENS = 32
TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
"""Nats by which the probe's log-probs may differ on average; any single one by `WORST` times as much.

Measured, mean and worst: float32 3e-6 and 1e-5 (a tiny model). bfloat16 0.10 and 0.60 (SmolLM2-135M, the trainer
under autocast with float32 weights; the probe's tokens are improbable, -15 nats, where rounding is coarsest). So
in bfloat16 the check sees wrong, missing or stale tensors, but not a step smaller than the rounding.
"""
WORST = 10


class WeightSync:
    """Called with a version by every trainer process; the main one sends and verifies, all of them fail together.

    Requests that run are awaited first, or with `context.in_flight` held and resumed: vLLM drops what they computed
    with the old weights, and computes it again with the new ones before their next token.

    Where an update has failed, servers may have a mixture of weights: they stay paused, and hold requests, until a
    sync succeeds or `release`.
    """

    def __init__(self, servers: Sequence[Server], context: EngineContext) -> None:
        self.servers, self.policy, self.world = list(servers), context.policy, context.world
        self.tolerance = TOLERANCE[context.job.dtype] if context.sync.tolerance is None else context.sync.tolerance
        self.verify_every = context.sync.verify_every
        self.mode = "keep" if context.in_flight else "wait"
        self.probe = probe(int(self.policy.model.config.get_text_config().vocab_size))
        self.weights = Weights(self.policy, getattr(torch, context.job.dtype))
        self.transport = transport_of(context, self.weights)
        self._since_probe = 0

    def __call__(self, version: int) -> dict[str, float]:
        """Raises EngineError in every process if the weights cannot be sent or proven. `sync/seconds/probe` is 0
        where no probe was due."""
        began = time.perf_counter()
        main = self.world.is_main
        probing = main and self._probe_due()
        sent, failure = 0, ""
        weights = self.weights.stream()
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

    def _probe_due(self) -> bool:
        """At every `verify_every`th sync, the first one included, and where a server is new."""
        due = self._since_probe == 0 or not all(server.prepared for server in self.servers)
        self._since_probe = (1 if due else self._since_probe + 1) % self.verify_every
        return due

    def _update(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Hold requests, replace the weights, forget what was computed with the old ones, go on; the bytes sent."""
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
                self.policy.score(self.probe)
            return ""
        expected = self.policy.score(self.probe)
        try:
            for scored in each(self.servers, lambda server: server.score(self.probe)):
                compare(scored, expected, self.tolerance, version)
        except EngineError as error:
            return str(error)
        return ""


def compare_versions(server: Server, version: int) -> None:
    """Raise EngineError unless the server says that its weights are those of `version`."""
    echoed = server.weight_version()
    if echoed != str(version):
        raise EngineError(
            f"after a sync the vLLM server at {server.endpoint.url} has weight version {echoed}, the trainer {version}"
        )


def probe(vocabulary: int) -> list[int]:
    """A fixed sequence of tokens from all over the vocabulary."""
    return [(1 + i * 2654435761) % vocabulary for i in range(PROBE_TOKENS)]


def compare(server: Sequence[float], trainer: Sequence[float], tolerance: float, version: int) -> None:
    """Raise EngineError unless the probe's log-probs agree within `tolerance` nats (see there); NaN never does."""
    gaps = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(server, trainer, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if _mean(gaps) <= tolerance and gaps[worst] <= WORST * tolerance:
        return
    raise EngineError(
        f"the vLLM server does not have the trainer's weights after the sync to version {version}: over a probe of "
        f"{len(gaps)} tokens the mean log-prob is {_mean(server):.5f} on the server and {_mean(trainer):.5f} in the "
        f"trainer; the largest difference is at token {worst + 1}, {server[worst]:.5f} against "
        f"{trainer[worst]:.5f}: {gaps[worst]:.5f}, on average {_mean(gaps):.5f} (sync.tolerance is "
        f"{tolerance:g} on average, {WORST * tolerance:g} for one). Likely causes: the server serves another model "
        "or dtype; vLLM's loader skipped, renamed or kept a packed copy of a parameter; another run syncs to the "
        "same server"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
