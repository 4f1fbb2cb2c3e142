"""Sync all weights: stream the policy's parameters through a transport to every server, then verify them by a probe.

The probe: servers and trainer must give a fixed sequence of tokens the same log-probs. A server that starts with random
weights (`EngineJob.dummy`) is thereby proven at its first sync: a weight that never arrives moves the probe by nats.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

from grpocli.errors import EngineError, GrpoError
from grpocli.processes.threads import run_in_thread
from grpocli.rollout.vllm.client import call_all

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineContext, EngineJob, PolicyView
    from grpocli.rollout.vllm.client import ServerClient

PROBE_TOKENS = 32
PROBE_ROOM = 2 * PROBE_TOKENS
"""The least context of a server: the probe, and as many tokens sampled after it (`lora.py`)."""
TOLERANCE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
"""Nats by which the probe's log-probs may differ on average; any single one by `WORST` times as much.

Measured, mean and worst: float32 3e-6 and 1e-5 (a tiny model); bfloat16 0.10 and 0.60, float16 0.013 and 0.12
(SmolLM2-135M under autocast; the probe's tokens are improbable, -15 nats, where rounding is coarsest).
"""
FLOAT32_ON_GPU = 2e-2
"""vLLM's attention in float32 multiplies in TF32, to about 1e-3. Not measured yet."""
QUANTIZED = 0.5
"""For servers that round weights to 8 bits or fewer (engine.quantization). Not measured yet."""
WORST = 10

ParameterShape = tuple[str, tuple[int, ...]]
"""The name and the whole shape of a parameter, known without a gather."""


@contextmanager
def together(world: World) -> Iterator[None]:
    """A block whose error, in any process, is raised in every process. Collective."""
    failure: GrpoError | None = None
    try:
        yield
    except GrpoError as error:
        failure = error
    if found := world.gather_objects([] if failure is None else [failure]):
        raise found[0]


# What is sent


class PolicyWeights:
    """A policy's parameters for a server that computes in `dtype`.

    Sharded ones are gathered one at a time, which is collective: every process walks through `stream()` to its end.
    """

    def __init__(self, policy: PolicyView, dtype: torch.dtype) -> None:
        self.policy, self.dtype = policy, dtype

    @functools.cached_property
    def _renamed(self) -> bool:
        """Whether vLLM knows this model's weights only as they are in a file.

        transformers loads some models into modules of other names (Mixtral, Granite 4). Where it only stacks experts,
        or takes a language model out of one with images, vLLM does so too.
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
        return _as_saved(self.policy.model, name, tensor) if self._renamed else iter([(name, tensor)])

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

    @contextmanager
    def to_the_end(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """A block at whose end sharded weights are walked through, also after a failure: gathers are collective."""
        try:
            yield stream
        finally:
            for _ in stream if self.sharded else ():
                pass

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
    """Carries weights from the policy to all servers: `transports.py`."""

    weights: PolicyWeights
    collective: bool
    """Whether every process calls `send` (each sends the memory of its own GPU), or only the main process."""

    def send(self, servers: Sequence[ServerClient], stream: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Prepare new servers, then start, update and finish on every server; all are paused. Raises EngineError."""
        ...

    def close(self) -> None:
        """Free what it holds; a further `send` begins anew. After a failed collective `send` every process calls it."""
        ...


# The sync


class WeightSync:
    """Sends a version of the weights and verifies it. Every process calls it; the main one sends; all fail together.

    Running requests finish first. With `context.in_flight` they are frozen and resumed instead: vLLM then recomputes
    their keys and values with the new weights. After a failed transfer servers may have a mixture of weights, so they
    hold their requests until a sync succeeds or `release`.
    """

    def __init__(self, servers: list[ServerClient], context: EngineContext, transport: Transport) -> None:
        self.servers, self.world, self.transport = servers, context.world, transport
        self.weights = transport.weights
        self.pause_mode = "keep" if context.in_flight else "wait"
        self.verifier = WeightVerifier(context)

    def __call__(self, version: int) -> dict[str, float]:
        """Send and verify the weights; return `sync/bytes` and the seconds of each part.

        Raises EngineError in every process if the weights cannot be sent or verified.
        """
        began = time.perf_counter()
        self._send(version)
        updated = time.perf_counter()
        self._verify(version)
        return {
            "sync/bytes": float(self.weights.bytes()),
            "sync/seconds/update": updated - began,
            "sync/seconds/probe": time.perf_counter() - updated,
        }

    def _send(self, version: int) -> None:
        """Send the policy's weights. Collective."""
        servers = self.servers if self.world.is_main else []
        with together(self.world):  # before a collective send, which the main process would not join
            call_all(servers, lambda server: server.weight_version())  # raises if another run has changed them
            call_all(servers, lambda server: server.pause(self.pause_mode))
        with ExitStack() as stack:
            if self.transport.collective:
                stack.callback(self.transport.close)  # in every process, unless all succeed
            with together(self.world), self.weights.to_the_end(self.weights.stream()) as stream:
                if self.world.is_main or self.transport.collective:
                    self.transport.send(servers, stream, version)
                call_all(servers, lambda server: server.reset_prefix_cache(running=self.pause_mode == "keep"))
                call_all(servers, lambda server: verify_version(server, version))
                call_all(servers, lambda server: server.resume())
            stack.pop_all()

    def _verify(self, version: int) -> None:
        """Raise EngineError in every process unless the servers have the weights. Collective, after the resume."""
        with together(self.world):
            if self.world.is_main:
                self.verifier.verify(self.servers, version, first=self.pause_mode == "keep")
            elif self.weights.sharded:
                self.verifier.score()

    def release(self) -> None:
        """After a failed sync that is not repeated, let servers answer, so that no request hangs; nobody uses them."""
        for server in self.servers if self.world.is_main else []:
            with suppress(EngineError):  # the server is going away too; the failed sync has reported the cause
                if not server.lost:
                    server.abandon_update()
                    server.resume()

    def close(self) -> None:
        self.transport.close()


def verify_version(server: ServerClient, version: int) -> None:
    """Raise EngineError unless the server reports `version`."""
    if (reported := server.weight_version()) != version:
        where = f"the vLLM server at {server.endpoint.url}"
        raise EngineError(f"after a sync {where} has weight version {reported}, the trainer {version}")


# The probe


class WeightVerifier:
    """Compares log-probs of the prompt `token_ids`, the same in every sync. tolerance: nats on average."""

    def __init__(self, context: EngineContext) -> None:
        self.policy, sync = context.policy, context.sync
        self.token_ids = probe_prompt(int(self.policy.model.config.get_text_config().vocab_size))
        trains_on_gpu = next(self.policy.model.parameters()).device.type == "cuda"
        self.tolerance = sync.tolerance or tolerance(context.job, gpu=trains_on_gpu or bool(context.job.gpus))

    def score(self) -> list[float]:
        """The policy's log-probs of the probe. Collective if its weights are sharded."""
        return self.policy.score(self.token_ids)

    def verify(self, servers: Sequence[ServerClient], version: int, first: bool = False) -> None:
        """Raise EngineError unless every server's log-probs are the policy's; they are computed at the same time.

        first: before the requests that wait at the servers.
        """
        call = functools.partial(call_all, servers, lambda server: server.score(self.token_ids, first=first))
        scores = run_in_thread(call, "probe")
        expected = self.score()
        for scored in scores.result():
            require_close(scored, expected, self.tolerance, version)


def tolerance(job: EngineJob, gpu: bool) -> float:
    """Nats by which the probe's log-probs may differ on average if `sync.tolerance` is null."""
    if job.quantized:
        return QUANTIZED
    return FLOAT32_ON_GPU if gpu and job.dtype == "float32" else TOLERANCE[job.dtype]


def probe_prompt(vocabulary: int) -> list[int]:
    """The same tokens from all over the vocabulary in every run."""
    return [(1 + i * 2654435761) % vocabulary for i in range(PROBE_TOKENS)]


def require_close(server: Sequence[float], trainer: Sequence[float], tolerance: float, version: int) -> None:
    """Raise EngineError unless the log-probs agree within `tolerance` nats (see `TOLERANCE`); NaN never agrees."""
    gaps = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(server, trainer, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if mean(gaps) <= tolerance and gaps[worst] <= WORST * tolerance:
        return
    raise EngineError(
        f"the vLLM server does not have the trainer's weights after the sync to version {version}: over a probe of "
        f"{len(gaps)} tokens the mean log-prob is {mean(server):.5f} on the server and {mean(trainer):.5f} in the "
        f"trainer; the largest difference is at token {worst + 1}, {server[worst]:.5f} against "
        f"{trainer[worst]:.5f}: {gaps[worst]:.5f}, on average {mean(gaps):.5f} (sync.tolerance is "
        f"{tolerance:g} on average, {WORST * tolerance:g} for one). Likely causes: the server serves another model "
        "or dtype, or quantizes it without engine.quantization; vLLM's loader skipped, renamed or kept a packed copy "
        "of a parameter; another run syncs to the same server"
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
