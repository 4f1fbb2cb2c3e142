"""Sync LoRA updates: every version is sent as a new adapter, and the server's base weights never change.

While an adapter's B is 0, as at the start of a run, no probe shows whether vLLM binds it to a layer. So a new server
must first follow a canary: an adapter whose B is random for one kind of layer (q_proj, down_proj ...) after the other.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from grpocli.errors import ConfigError, EngineError, GrpoError
from grpocli.models import lora as peft
from grpocli.models.lora import WEIGHTS, adapter_tensors, lora_layers, switched_off, write_config
from grpocli.models.quantization import whole_weight
from grpocli.rollout.vllm.client import ADAPTER, MODEL, RequestRefused, call_all
from grpocli.rollout.vllm.transports import writing_to
from grpocli.rollout.vllm.weight_sync import WeightVerifier, mean, require_close, together, verify_version

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, PolicyView
    from grpocli.rollout.vllm.client import ServerClient

logger = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's values of `max-lora-rank`; an adapter may have any rank up to the server's."""
LOADED = 2
"""Adapters in the server's memory: the newest, and the one that running requests may still use."""
FOLDER = "adapter-"
CANARY_ADAPTER = f"{MODEL}-canary-"
"""With the kind of its layers, the name of an adapter that is loaded as a test only; no request names it."""
Layers = Sequence[tuple[str, Any]]
"""Layers with an update, by name."""
ADAPTERS = (ADAPTER, CANARY_ADAPTER)
"""Prefixes of the names of adapters that runs load."""

FOLLOWED, ROUNDING = 1 / 3, 8
"""The largest share of a canary's movement by which a server may miss it, if that is less than ROUNDING tolerances.

In the median over the probe's tokens: the base model stays as it is, so bfloat16 moves single tokens by nats. Measured
on SmolLM2-135M, 21 adapters: by 3 to 18 % of the movement in the median, and by 35 % for one. So there are attempts.
"""
ATTEMPTS = 5
"""Canaries of one kind of layer, each with another random B, that a server must miss before it is refused."""
LEAST = 0.01
"""Nats that a canary must move the trainer's probe on average; it is not sent otherwise."""
MOVED = 2.0
"""Nats by which a canary moves the trainer's probe on average, where the model can be moved as far."""
LARGEST_SHARE, TRIES = 16.0, 6


def lora_flags(rank: int, dtype: str, cpu: bool) -> dict[str, Any]:
    """vLLM's options for adapters of this rank (none for 0). Raises ConfigError if vLLM cannot serve them."""
    if rank == 0:
        return {}
    if rank > RANKS[-1]:
        raise ConfigError(f"vLLM serves ranks up to {RANKS[-1]}: lower it", key="model.lora.rank", value=rank)
    if dtype == "float32" and not cpu:
        problem = "vLLM's LoRA kernels on a GPU compute in bfloat16 or float16: take bfloat16, or engine=transformers"
        raise ConfigError(problem, key="model.dtype", value=dtype)
    fits = next(size for size in RANKS if size >= rank)
    return {"enable_lora": True, "max_lora_rank": fits, "max_loras": LOADED, "max_cpu_loras": LOADED}


class AdapterSync:
    """Sends a version of the adapter and verifies it. Every process calls it; the main one sends; all fail together.

    A version has a new name and folder, which is deleted when no request can use it: vLLM may read it again till then.
    """

    def __init__(self, servers: list[ServerClient], context: EngineContext) -> None:
        self.servers, self.policy, self.world = servers, context.policy, context.world
        self.in_flight, self._before_change = context.in_flight, context.before_change
        self.dtype: torch.dtype = getattr(torch, context.job.dtype)
        self.verifier, self.canary = WeightVerifier(context), context.sync.canary

    def __call__(self, version: int) -> dict[str, float]:
        """Send and verify the adapter; return `sync/bytes` and the seconds of each part.

        Raises EngineError in every process if the adapter cannot be sent or verified. Raises ConfigError in every
        process if vLLM's implementation of the model does not support `model.lora.target_modules`.
        """
        if self.world.broadcast_object(self.canary and not all(server.prepared for server in self.servers)):
            self._before_change()
        used = set(self.world.gather_objects([name for server in self.servers for name in server.adapters_in_use()]))
        sent = "", dict[str, float]()
        with together(self.world):
            if self.world.is_main:
                sent = self._sync(version, used)
        name, metrics = self.world.broadcast_object(sent)
        for server in self.servers:
            server.model, server.prepared = name, True
        return metrics

    def release(self) -> None:
        """Do nothing: a failed sync has resumed requests already, each with the adapter that it names."""

    def close(self) -> None:
        """Unload this run's adapters from the remaining servers and delete their folders."""
        for server in self.servers if self.world.is_main else []:
            with suppress(EngineError):  # the server keeps them until the next run unloads them
                if not server.lost:
                    self._unload(server, server.adapters(), keep=set())

    def _sync(self, version: int, used: set[str]) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()
        new = [server for server in self.servers if not server.prepared]
        if new:
            self._verify_base(new, version)
        if new and self.canary:
            self._send_canaries(new)
        proven = time.perf_counter()
        name, sent = self._send(version, used)
        call_all(self.servers, lambda server: verify_version(server, version))
        updated = time.perf_counter()
        self._verify(self.servers, version)
        return name, {
            "sync/bytes": float(sent),
            "sync/seconds/canary": proven - began,
            "sync/seconds/update": updated - proven,
            "sync/seconds/probe": time.perf_counter() - updated,
        }

    def _send_canaries(self, servers: Sequence[ServerClient]) -> None:
        """Raise EngineError unless new servers, which take no requests yet, follow a canary of each kind of layer."""
        start = self.verifier.score()
        for kind, layers in adapter_kinds(self.policy).items():
            for attempt in range(ATTEMPTS):
                if not (problem := self._send_canary(servers, start, kind, layers, attempt)):
                    break
            else:
                raise EngineError(problem)

    def _send_canary(
        self, servers: Sequence[ServerClient], start: list[float], kind: str, layers: Layers, attempt: int
    ) -> str:
        """Why a server does not follow random updates of one kind of layer; "" if all do."""
        with canary_adapter(self.policy, layers, lambda: mean(gaps(start, self.verifier.score())), attempt) as moved:
            if not LEAST <= moved < math.inf:
                told = "a canary of %s moves the trainer's probe by %.2g nats, so it proves nothing about this model"
                logger.warning(told, kind, moved)
                return ""
            expected, tensors = self.verifier.score(), self._tensors()
            scores = call_all(servers, partial(self._score_adapter, kind=kind, tensors=tensors))
            changed = f"{len(layers)} layers called {kind}"
            problems = [not_followed(scored, expected, start, self.verifier.tolerance, changed) for scored in scores]
            return next(filter(None, problems), "")

    def _score_adapter(self, server: ServerClient, kind: str, tensors: dict[str, torch.Tensor]) -> list[float]:
        """The probe's log-probs of an adapter that is loaded for them alone."""
        name = f"{CANARY_ADAPTER}{kind}"
        self._unload(server, server.adapters(), keep=set(), prefix=CANARY_ADAPTER)  # of a run that was killed or failed
        self._load_adapter(server, name, tensors)
        scored = server.score(self.verifier.token_ids, model=name)
        self._unload(server, server.adapters(), keep=set(), prefix=CANARY_ADAPTER)
        return scored

    def _send(self, version: int, used: set[str]) -> tuple[str, int]:
        """Load a new adapter into every server; return its name and its bytes."""
        tensors = self._tensors()
        call_all(self.servers, lambda server: server.weight_version())  # raises if another run has changed them
        loaded = call_all(self.servers, lambda server: server.adapters())
        name = _new_name(version, {name for adapters in loaded for name in adapters})

        def load(server: ServerClient) -> None:
            self._load_adapter(server, name, tensors)
            server.set_version(version)

        with self._requests_held():
            call_all(self.servers, load)
        for server, adapters in zip(self.servers, loaded, strict=True):
            self._unload(server, adapters, keep={server.model, *used})
            server.model = name
        return name, sum(tensor.nbytes for tensor in tensors.values())

    @contextmanager
    def _requests_held(self) -> Iterator[None]:
        """A block before which running requests finish; with `in_flight` they continue with their adapter."""
        if self.in_flight:
            yield
            return
        try:
            call_all(self.servers, lambda server: server.pause("wait"))
            yield
        except GrpoError:
            with suppress(EngineError):  # the error under way is the cause
                call_all(self.servers, lambda server: server.resume())
            raise
        call_all(self.servers, lambda server: server.resume())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The adapter in the server's dtype, to which vLLM would cast it anyway; bfloat16 halves the bytes."""
        named = adapter_tensors(self.policy.model)
        return {name: tensor.detach().to("cpu", self.dtype).contiguous() for name, tensor in named}

    def _load_adapter(self, server: ServerClient, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a new folder in peft's format into the folder for weights, and have the server load it."""
        root = Path(server.endpoint.shm_dir).absolute()
        with ExitStack() as stack:
            with writing_to(root):
                folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=root))
                stack.callback(shutil.rmtree, folder)
                write_config(self.policy.model, folder)
                (folder / WEIGHTS).write_bytes(save(tensors))
            try:
                server.load_adapter(name, folder)
            except RequestRefused as error:
                if not (
                    found := re.search(r"expected target modules in (.*?) but received (.*?)\. Please", str(error))
                ):
                    raise
                problem = f"vLLM's model takes no updates of {found[2]}; target only {found[1]}"
                raise ConfigError(problem, key="model.lora.target_modules") from error
            stack.pop_all()

    def _unload(
        self, server: ServerClient, adapters: dict[str, Path], keep: set[str], prefix: tuple[str, ...] | str = ADAPTERS
    ) -> None:
        """Unload and delete the adapters, also an earlier run's, that no request can use any more."""
        root = Path(server.endpoint.shm_dir).absolute()
        for name, folder in adapters.items():
            if name in keep or not name.startswith(prefix):
                continue
            server.unload_adapter(name)
            if folder.parent == root and folder.name.startswith(FOLDER):
                shutil.rmtree(folder, ignore_errors=True)  # the server's folder is removed with the server

    def _verify_base(self, new: Sequence[ServerClient], version: int) -> None:
        """Raise EngineError unless new servers have the policy's base weights; each server is checked once."""
        for server in new:
            server.model = MODEL
            server.abandon_update()  # a killed run may have left an update and a pause
            server.resume()
        with switched_off(self.policy.model):
            self._verify(new, version)

    def _verify(self, servers: Sequence[ServerClient], version: int) -> None:
        """Compare the probe's log-probs; during other requests, those of tokens that the servers sample after it.

        On a CPU vLLM 0.32 crashes when it computes a prompt's log-probs together with another adapter's request.
        """
        if not self.in_flight:
            self.verifier.verify(servers, version)
            return
        start = self.verifier.token_ids
        for ids, scored in call_all(servers, lambda server: server.sample(start, len(start))):
            expected = self.policy.score([*start, *ids])[-len(ids) :]
            require_close(scored, expected, self.verifier.tolerance, version)


def _new_name(version: int, taken: set[str]) -> str:
    """policy-v7, or policy-v7.1 if that name is taken, because vLLM identifies adapters by name."""
    names = chain([f"{ADAPTER}{version}"], (f"{ADAPTER}{version}.{again}" for again in count(1)))
    return next(name for name in names if name not in taken)


# The canary


def adapter_kinds(policy: PolicyView) -> dict[str, list[tuple[str, Any]]]:
    """The layers with an update by the last part of their names: q_proj, down_proj ..."""
    kinds: dict[str, list[tuple[str, Any]]] = {}
    for name, layer in lora_layers(policy.model):
        kinds.setdefault(name.rpartition(".")[2], []).append((name, layer))
    return kinds


@contextmanager
def canary_adapter(policy: PolicyView, layers: Layers, move: Callable[[], float], attempt: int = 0) -> Iterator[float]:
    """A block in which B of these layers is random and large enough to move the probe by `MOVED` nats, if it can.

    move: how far the trainer's probe has moved, in nats. Yields that. attempt: each is random anew.
    """
    b_weights = [layer.lora_B[peft.ADAPTER].weight for _, layer in layers]
    kept = [(weight, weight.detach().clone()) for weight in b_weights]
    units = [_unit(f"{name} {attempt}", layer) for name, layer in layers]
    try:
        share, reached = 0.25, 0.0
        for _ in range(TRIES):
            with torch.no_grad():
                for (weight, _), unit in zip(kept, units, strict=True):
                    weight.copy_(unit * share)
            reached = move()
            if not math.isfinite(reached) or reached >= MOVED or share >= LARGEST_SHARE:
                break
            share = min(share * min(4.0, max(1.3, 1.25 * MOVED / max(reached, 1e-9))), LARGEST_SHARE)
        yield reached
    finally:
        with torch.no_grad():
            for weight, own in kept:
                weight.copy_(own)


def _unit(seed_text: str, layer: Any) -> torch.Tensor:
    """A random B, the same for the same text, with which the update is about as large as the layer's weight."""
    a, b = layer.lora_A[peft.ADAPTER].weight.detach(), layer.lora_B[peft.ADAPTER].weight
    seed = torch.Generator().manual_seed(zlib.crc32(seed_text.encode()))
    signs = torch.randint(0, 2, tuple(b.shape), generator=seed, dtype=torch.float32).mul_(2).sub_(1)
    scaling = layer.scaling[peft.ADAPTER]
    size = whole_weight(layer.base_layer).float().norm() / (a.norm() * math.sqrt(b.shape[0]) * scaling)
    return signs.to(b.device, b.dtype) * (size if torch.isfinite(size) and size > 0 else 1.0)


def not_followed(
    server: Sequence[float], trainer: Sequence[float], start: Sequence[float], tolerance: float, layers: str
) -> str:
    """Why the server's log-probs are not near the trainer's under a canary; "" if they are.

    start: the trainer's with its own adapter. layers: those that the canary changes.
    """
    difference, movement = median(gaps(server, trainer)), median(gaps(start, trainer))
    limit = min(ROUNDING * tolerance, FOLLOWED * movement)
    if difference <= limit:
        return ""
    way = [after - before for before, after in zip(start, trainer, strict=True)]
    gone = [after - before for before, after in zip(start, server, strict=True)]
    share = sum(a * b for a, b in zip(gone, way, strict=True)) / max(sum(a * a for a in way), 1e-12)
    followed = f"{share:.0%} of the way" if math.isfinite(share) else "nowhere, its log-probs are not finite"
    return (
        f"the vLLM server does not follow the trainer's adapter: random updates of the {layers} move the log-probs of "
        f"the trainer's probe by {movement:.3f} nats in the median; the server went {followed} and differs by "
        f"{difference:.3f} ({limit:.3g} is allowed, see sync.tolerance). Likely causes: vLLM binds the adapter to no "
        "such layer (its own names differ, or it fuses them with layers that have no update: "
        "model.lora.target_modules), ignores its scale, or keeps an older adapter. sync.canary=false starts without "
        "this check"
    )


def gaps(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The absolute differences of log-probs in nats; infinite if any is not finite."""
    found = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return found if all(map(math.isfinite, found)) else [math.inf] * len(found)
