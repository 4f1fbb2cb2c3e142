"""Sync all weights: stream the policy's parameters through a transport to every server, then verify them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

from grpocli.errors import EngineError
from grpocli.rollout.vllm.client import CANARY, call_all
from grpocli.rollout.vllm.weight_verifier import SAMPLED, WeightVerifier, canary_tells, canary_weights

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineContext, PolicyView
    from grpocli.rollout.vllm.client import ServerClient


ParameterShape = tuple[str, tuple[int, ...]]
"""The name and the whole shape of a parameter, known without a gather."""


class PolicyWeights:
    """A policy's parameters for a server that computes in `dtype`.

    Sharded ones are gathered one at a time, which is collective: every process walks through `stream()` to its end.
    """

    def __init__(self, policy: PolicyView, dtype: torch.dtype) -> None:
        self.policy, self.dtype = policy, dtype

    @functools.cached_property
    def _renamed(self) -> bool:
        """Whether vLLM knows this model's weights only as they are in a file.

        transformers loads some models into modules of other names (Mixtral, Granite 4). Where it only stacks the
        experts of a layer, vLLM takes the stack, which is one tensor instead of hundreds; where it takes a language
        model out of one with images, vLLM does so too.
        """
        from transformers import PreTrainedModel

        model = self.policy.model
        if not isinstance(model, PreTrainedModel):
            return False
        named = ((name, torch.empty(parameter.shape, device="meta")) for name, parameter in model.named_parameters())
        return any(
            f"{name.rpartition('.')[0].removeprefix('model.')}." not in saved
            for name, tensor in named
            if ".lora_" not in name and ".base_layer." not in name
            for saved, _ in _as_saved(model, name, tensor)
        )

    def _as_known(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A weight under the names by which vLLM knows it."""
        if self._renamed:
            yield from _as_saved(self.policy.model, name, tensor)
        else:
            yield name, tensor

    @property
    def sharded(self) -> bool:
        """Whether other processes hold a part (FSDP2: parameters are DTensors; ZeRO-3: they are empty)."""
        parameters = self.policy.model.parameters()
        return any(hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_shape") for parameter in parameters)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters in order, in the dtype of training; FSDP2's are cast before they travel."""
        for name, tensor in self.policy.weights():
            part: Any = tensor.detach()
            whole = part.to(self.dtype).full_tensor() if hasattr(part, "full_tensor") else part
            yield from self._as_known(name, whole)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of a checkpoint, such as GLM-4.5's expert biases, for a vLLM that has not read one.

        They never change, and need the dtype that they have: biases in bfloat16 choose other experts.
        """
        saved = self.policy.model.state_dict()
        for name, buffer in self.policy.model.named_buffers():
            if name in saved and buffer.is_floating_point():
                yield from self._as_known(name, buffer)

    def shapes(self) -> list[ParameterShape]:
        """The names and shapes of the parameters of `stream`, without a gather."""
        model = self.policy.model
        if any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):  # ZeRO-3, which has no LoRA
            found = [(name, tuple(parameter.ds_shape)) for name, parameter in model.named_parameters()]
        else:
            found = [(name, tuple(tensor.shape)) for name, tensor in self.policy.weights()]
        return [
            (known, tuple(tensor.shape))
            for name, shape in found
            for known, tensor in self._as_known(name, torch.empty(shape, device="meta"))
        ]

    def bytes(self) -> int:
        """The bytes that one server receives."""
        return sum(torch.Size(shape).numel() for _, shape in self.shapes()) * self.dtype.itemsize


def _as_saved(model: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors that a weight has in a file of transformers."""
    from transformers.core_model_loading import revert_weight_conversion

    for saved, part in revert_weight_conversion(model, {name: tensor}).items():
        yield saved, part.contiguous()


class Transport(Protocol):
    """Carries weights from the policy to all servers: `transport_shm.py`, `transport_gpu.py`."""

    weights: PolicyWeights
    collective: bool
    """Whether every process calls `send` (each sends the memory of its own GPU), or only the main process."""

    def send(
        self, servers: Sequence[ServerClient], stream: Iterator[tuple[str, torch.Tensor]], version: int | str
    ) -> None:
        """Prepare new servers, then start, update and finish on every server; all are paused. Raises EngineError."""
        ...

    def close(self) -> None:
        """Free what it holds; a further `send` begins anew. After a failed collective `send` every process calls it."""
        ...


class WeightSync:
    """Sends a version of the weights and verifies it. Every process calls it; the main one sends; all fail together.

    A new server gets a canary first (`weight_verifier.py`): it must follow weights that are far from any that it may
    have kept. One that starts with random weights (`EngineJob.dummy`) needs none.

    Running requests finish first. With `context.in_flight` they are frozen and resumed instead: vLLM then recomputes
    their keys and values with the new weights before it samples their next token.

    After a failed transfer servers may hold a mixture of weights. They hold their requests until a sync succeeds or
    `release`.
    """

    def __init__(
        self, servers: Sequence[ServerClient], context: EngineContext, make_transport: Callable[[], Transport]
    ) -> None:
        """make_transport: called again for a canary that only some servers get."""
        self.servers, self.policy, self.world = list(servers), context.policy, context.world
        self._make_transport, self.transport = make_transport, make_transport()
        self.weights = self.transport.weights
        self._before_change = context.before_change
        self._dummy = context.job.dummy  # whether a new server has random weights
        self._stale_caches = False  # whether servers may have cached the keys of a canary or of random weights
        self.pause_mode = "keep" if context.in_flight else "wait"
        self.verifier = WeightVerifier(context)

    def __call__(self, version: int) -> dict[str, float]:
        """Send and verify the weights; return `sync/bytes` and the seconds of each part (a probe may not be due).

        Raises EngineError in every process if the weights cannot be sent or verified.
        """
        began = time.perf_counter()
        main = self.world.is_main
        due = main and self.verifier.due(new=not all(server.prepared for server in self.servers))
        unproven = [k for k, server in enumerate(self.servers) if not server.proven]
        due, unproven = self.world.broadcast_object((due, unproven if self.verifier.canary else []))
        if unproven:
            self._prove([self.servers[k] for k in unproven])
        proven = time.perf_counter()
        self._transfer(self.transport, self.servers, version)
        updated = time.perf_counter()
        if due:
            self._verify(version)
            self.verifier.passed()
        self._stale_caches = False
        return {
            "sync/bytes": float(self.weights.bytes()),
            "sync/seconds/canary": proven - began,
            "sync/seconds/update": updated - proven,
            "sync/seconds/probe": time.perf_counter() - updated,
        }

    def _prove(self, servers: Sequence[ServerClient]) -> None:
        """Prove that new servers, which take no requests yet, follow the weights that they are sent. Collective."""
        if self._dummy:  # random weights prove the first sync as a canary would; caches get their keys
            long_prompt = self.verifier.long_prompt
            self._in_main(lambda: call_all(servers, lambda server: server.sample(long_prompt, SAMPLED)))
            self._stale_caches = True
        else:
            self._send_canary(servers)
        for server in servers:
            server.proven = True

    def _send_canary(self, servers: Sequence[ServerClient]) -> None:
        """Send a canary and verify that the servers follow it. Collective.

        If others go on with their weights, it goes through a transport of its own, after which all are prepared again.
        """
        self._before_change()
        start = self._score()
        with canary_weights(self.policy):
            changed = self._score()
            if not self.world.broadcast_object(canary_tells(start, changed)):
                return
            self._stale_caches = True
            whole = len(servers) == len(self.servers)
            transport = self.transport if whole else self._make_transport()
            try:
                self._transfer(transport, servers, CANARY)
                self._in_main(lambda: self._verify_followed(servers, start, changed))
                self._verify_caches(servers, CANARY)
            finally:
                if not whole:
                    transport.close()
                    for server in servers:
                        server.prepared = False

    def _score(self) -> list[float]:
        """The trainer's log-probs of the probe, in the main process and in those that score with it."""
        return self.policy.score(self.verifier.token_ids) if self.world.is_main or self.weights.sharded else []

    def _transfer(self, transport: Transport, servers: Sequence[ServerClient], version: int | str) -> None:
        """Send the policy's weights. Collective."""
        self._in_main(lambda: self._pause(servers))  # before a collective send, which the main process would not join
        failures, stream = list[str](), LockedIterator(self.weights.stream())
        try:
            if self.world.is_main or transport.collective:
                transport.send(servers if self.world.is_main else [], stream, version)
            if self.world.is_main:
                call_all(servers, lambda server: server.reset_prefix_cache(running=self.pause_mode == "keep"))
                call_all(servers, lambda server: verify_version(server, version))
                call_all(servers, lambda server: server.resume())
        except EngineError as error:
            failures.append(str(error))
        if self.world.size > 1 and self.weights.sharded:
            for _ in stream:  # gathers are collective, so every process finishes them, also after a failure
                pass
        try:
            raise_together(self.world, failures)
        except EngineError:
            if transport.collective:
                transport.close()
            raise

    def release(self) -> None:
        """After a failed sync that is not repeated, let servers answer, so that no request hangs; nobody uses them."""
        if self.world.is_main:
            for server in self.servers:
                with suppress(EngineError):  # the server is going away too; the failed sync has reported the cause
                    if not server.lost:
                        server.abandon_update()
                        server.resume()

    def close(self) -> None:
        self.transport.close()

    def _pause(self, servers: Sequence[ServerClient]) -> None:
        call_all(servers, lambda server: server.weight_version())  # raises if another run has changed them
        call_all(servers, lambda server: server.pause(self.pause_mode))

    def _verify(self, version: int) -> None:
        """Raise EngineError in every process unless the servers have the weights. Collective.

        Called after the resume, since the probe is a request. Other processes score too, which may be collective.
        """
        beside = self.pause_mode == "keep"
        if not self.world.is_main:
            self._score()
        self._in_main(lambda: self.verifier.verify(self.servers, version, beside_requests=beside))
        if self._stale_caches:
            self._verify_caches(self.servers, version)

    def _verify_followed(self, servers: Sequence[ServerClient], start: list[float], changed: list[float]) -> None:
        beside = self.pause_mode == "keep"
        for scored in call_all(servers, lambda server: server.score(self.verifier.token_ids, first=beside)):
            self.verifier.verify_followed(scored, changed, start)

    def _verify_caches(self, servers: Sequence[ServerClient], version: int | str) -> None:
        """Verify the tokens that the servers sample after a long prompt, whose keys earlier weights have computed.

        Collective; the other processes of a sharded policy score as often.
        """
        failures = []
        for server in servers:
            if self.world.is_main:
                try:
                    self.verifier.verify_sampled(server.sample, version)
                except EngineError as error:
                    failures.append(str(error))
            elif self.weights.sharded:
                self.verifier.score_sampled([])
        raise_together(self.world, failures)

    def _in_main(self, call: Callable[[], object]) -> None:
        """Call in the main process; its EngineError is raised in every process. Collective."""
        failures = []
        if self.world.is_main:
            try:
                call()
            except EngineError as error:
                failures.append(str(error))
        raise_together(self.world, failures)


def raise_together(world: World, failures: Sequence[str]) -> None:
    """Raise EngineError in every process if one of them has failed. Collective. failures: of this process."""
    if found := world.gather_objects(failures[:1]):
        raise EngineError(found[0])


class LockedIterator:
    """An iterator for two threads: a transfer that has timed out may still gather while the main thread goes on."""

    def __init__(self, items: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._lock:
            return next(self._items)


def verify_version(server: ServerClient, version: int | str) -> None:
    """Raise EngineError unless the server reports `version`."""
    reported = server.weight_version()
    if reported != version:
        raise EngineError(
            f"after a sync the vLLM server at {server.endpoint.url} has weight version {reported}, "
            f"the trainer {version}"
        )
