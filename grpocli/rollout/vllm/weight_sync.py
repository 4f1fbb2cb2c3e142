"""Sync all weights: stream the policy's parameters through a transport to every server, then verify them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from grpocli.errors import EngineError
from grpocli.rollout.vllm.client import call_all
from grpocli.rollout.vllm.weight_verifier import WeightVerifier

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, PolicyView
    from grpocli.rollout.vllm.client import ServerClient


class ParameterShape(NamedTuple):
    """The name and the whole shape of a parameter, known without a gather."""

    name: str
    shape: tuple[int, ...]


class PolicyWeights:
    """A policy's parameters for a server that computes in `dtype`; sharded ones are gathered one at a time.

    A gather is collective, so every process walks through `stream()` in the same order, and to its end.
    """

    def __init__(self, policy: PolicyView, dtype: torch.dtype) -> None:
        self.policy, self.dtype = policy, dtype

    @property
    def sharded(self) -> bool:
        """Whether other processes hold a part (FSDP2: parameters are DTensors; ZeRO-3: they are empty)."""
        parameters = self.policy.model.parameters()
        return any(hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_shape") for parameter in parameters)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters in order, in the dtype of training."""
        for name, tensor in self.policy.weights():
            part = tensor.detach()
            yield name, part.full_tensor() if hasattr(part, "full_tensor") else part

    def shapes(self) -> list[ParameterShape]:
        """The names and shapes of the parameters of `stream`, without a gather."""
        model = self.policy.model
        if any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):  # ZeRO-3, which has no LoRA
            return [ParameterShape(name, tuple(parameter.ds_shape)) for name, parameter in model.named_parameters()]
        return [ParameterShape(name, tuple(tensor.shape)) for name, tensor in self.policy.weights()]

    def bytes(self) -> int:
        """The bytes that one server receives."""
        return sum(torch.Size(parameter.shape).numel() for parameter in self.shapes()) * self.dtype.itemsize


class Transport(Protocol):
    """Carries weights from the policy to all servers: `transport_shm.py`, `transport_gpu.py`."""

    weights: PolicyWeights
    collective: bool
    """Whether every process calls `send` (each sends the memory of its own GPU), or only the main process."""

    def send(self, servers: Sequence[ServerClient], stream: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Prepare new servers, then start, update and finish on every server; return the bytes for each server.

        The servers are paused. Raises EngineError.
        """
        ...

    def close(self) -> None: ...


class WeightSync:
    """Sends a version of the weights and verifies it. Every process calls it; the main one sends; all fail together.

    Running requests finish first. With `context.in_flight` they are frozen and resumed instead: vLLM then recomputes
    their keys and values with the new weights before it samples their next token.

    After a failed transfer servers may hold a mixture of weights. They hold their requests until a sync succeeds or
    `release`.
    """

    def __init__(self, servers: Sequence[ServerClient], context: EngineContext, transport: Transport) -> None:
        self.servers, self.policy, self.world = list(servers), context.policy, context.world
        self.transport, self.weights = transport, transport.weights
        self.pause_mode = "keep" if context.in_flight else "wait"
        self.verifier = WeightVerifier(context)

    def __call__(self, version: int) -> dict[str, float]:
        """Send and verify the weights; return `sync/bytes` and the seconds of the update and of the probe (near 0 if
        the probe is not due).

        Raises EngineError in every process if the weights cannot be sent or verified.
        """
        began = time.perf_counter()
        main = self.world.is_main
        verifying = main and self.verifier.due(new=not all(server.prepared for server in self.servers))
        sent, failure = 0, ""
        stream = LockedIterator(self.weights.stream())
        try:
            if main:
                sent = self._update(stream, version)
            elif self.transport.collective:
                self.transport.send([], stream, version)
        except EngineError as error:
            failure = str(error)
        if self.world.size > 1 and self.weights.sharded:
            for _ in stream:  # gathers are collective, so every process finishes them, also after a failure
                pass
        sent, failure, verifying = self.world.broadcast_object((sent, failure, verifying))
        updated = time.perf_counter()
        if not failure and verifying:
            failure = self.world.broadcast_object(self._verify(version))
        if failure:
            raise EngineError(failure)
        seconds = {"sync/seconds/update": updated - began, "sync/seconds/probe": time.perf_counter() - updated}
        return {"sync/bytes": float(sent), **seconds}

    def release(self) -> None:
        """After a failed sync that is not repeated, let the remaining servers answer, so that no request hangs.

        The caller discards the answers.
        """
        if self.world.is_main:
            for server in self.servers:
                with suppress(EngineError):  # the server is going away too; the failed sync has reported the cause
                    if not server.lost:
                        server.abandon_update()
                        server.resume()

    def close(self) -> None:
        self.transport.close()

    def _update(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Pause, replace the weights, drop the prefix cache, verify the version, resume; return the bytes sent."""
        call_all(self.servers, lambda server: server.weight_version())  # raises if another run has changed them
        call_all(self.servers, lambda server: server.pause(self.pause_mode))
        sent = self.transport.send(self.servers, stream, version)
        call_all(self.servers, lambda server: server.reset_prefix_cache(running=self.pause_mode == "keep"))
        call_all(self.servers, lambda server: verify_version(server, version))
        call_all(self.servers, lambda server: server.resume())
        return sent

    def _verify(self, version: int) -> str:
        """The problem that the verifier finds, in the main process; "" if the servers have the weights.

        Called after the resume, since the probe is itself a request. Scoring a sharded policy is collective, so the
        other processes score too.
        """
        if not self.world.is_main:
            if self.weights.sharded:
                self.policy.score(self.verifier.token_ids)
            return ""
        try:
            self.verifier.verify(self.servers, version, beside_requests=self.pause_mode == "keep")
        except EngineError as error:
            return str(error)
        return ""


class LockedIterator:
    """An iterator that two threads may advance.

    A transfer that has timed out may still be in a gather in its thread while the main thread makes the next ones.
    """

    def __init__(self, items: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._lock:
            return next(self._items)


def verify_version(server: ServerClient, version: int) -> None:
    """Raise EngineError unless the server reports `version`."""
    reported = server.weight_version()
    if reported != version:
        raise EngineError(
            f"after a sync the vLLM server at {server.endpoint.url} has weight version {reported}, "
            f"the trainer {version}"
        )
