"""Sync LoRA updates: every version is sent as a new adapter, and the server's base weights never change."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from grpocli.errors import ConfigError, EngineError, GrpoError
from grpocli.models.lora import WEIGHTS, adapter_tensors, switched_off, write_config
from grpocli.rollout.vllm.client import ADAPTER, CANARY, MODEL, call_all
from grpocli.rollout.vllm.connection import Refused, ServerGone
from grpocli.rollout.vllm.transport_shm import write_error
from grpocli.rollout.vllm.weight_sync import verify_version
from grpocli.rollout.vllm.weight_verifier import (
    ADAPTER_ATTEMPTS,
    Layers,
    NotFollowed,
    WeightVerifier,
    adapter_kinds,
    canary_adapter,
    canary_tells,
    mean_gap,
)

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, EngineJob
    from grpocli.rollout.vllm.client import ServerClient

logger = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's values of `max-lora-rank`; an adapter may have any rank up to the server's."""
LOADED = 2
"""Adapters in the server's memory: the newest, and the one that running requests may still use."""
FOLDER = "adapter-"
CANARY_ADAPTER = f"{MODEL}-{CANARY}-"
"""With the kind of its layers, the name of an adapter that is loaded as a test only; no request names it."""
ADAPTERS = (ADAPTER, CANARY_ADAPTER)
"""Prefixes of the names of adapters that runs load."""


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
    return {"enable-lora": True, "max-lora-rank": fits, "max-loras": LOADED, "max-cpu-loras": LOADED}


def lora_misfit(served: dict[str, Any], job: EngineJob) -> str:
    """The reason why an external server cannot serve the job's adapters, from its description; "" if it can."""
    limit = (served.get("lora_config") or {}).get("max_lora_rank", 0)
    advice = f"serve with lora_rank={job.lora_rank}"
    if job.lora_rank and not limit:
        return f"that server takes no adapters, the run trains one (model.lora.rank={job.lora_rank}): {advice}"
    if job.lora_rank > limit:
        return f"that server takes adapters up to rank {limit}, the run has model.lora.rank={job.lora_rank}: {advice}"
    if limit and not job.lora_rank:
        return "that server takes adapters, the run trains all weights (model.lora.rank=0): serve without lora_rank"
    return ""


class AdapterSync:
    """Sends a version of the adapter and verifies it. Every process calls it; the main one sends; all fail together.

    A version has a new name and a new folder. vLLM's prefix cache is keyed by both, so nothing computed with older
    updates is reused. vLLM holds `LOADED` adapters, drops the least recently used, and reads it from its folder again
    when a request needs it; so a folder is deleted only when no request can use it any more.
    """

    def __init__(self, servers: Sequence[ServerClient], context: EngineContext) -> None:
        self.servers, self.policy, self.world = list(servers), context.policy, context.world
        self.in_flight, self._before_change = context.in_flight, context.before_change
        self.dtype: torch.dtype = getattr(torch, context.job.dtype)
        self.verifier = WeightVerifier(context)

    def __call__(self, version: int) -> dict[str, float]:
        """Send and verify the adapter; return `sync/bytes` and the seconds of each part (a probe may not be due).

        Raises EngineError in every process if the adapter cannot be sent or verified. Raises ConfigError in every
        process if vLLM's implementation of the model does not support `model.lora.target_modules`.
        """
        unproven = self.verifier.canary and not all(server.proven for server in self.servers)
        if self.world.broadcast_object(unproven):
            self._before_change()
        used = set(self.world.gather_objects([name for server in self.servers for name in server.adapters_in_use()]))
        name, failure = "", None
        metrics: dict[str, float] = {}
        if self.world.is_main:
            try:
                name, metrics = self._sync(version, used)
            except (ConfigError, EngineError) as error:
                failure = EngineError if isinstance(error, Refused) else type(error), str(error)
        name, metrics, failure = self.world.broadcast_object((name, metrics, failure))
        if failure:
            kind, text = failure
            raise kind(text)
        for server in self.servers:
            server.model, server.prepared = name, True
        return metrics

    def release(self) -> None:
        """Do nothing: a failed sync has resumed requests already, each with the adapter that it names."""

    def close(self) -> None:
        """Unload this run's adapters from the remaining servers and delete their folders."""
        if not self.world.is_main:
            return
        for server in self.servers:
            if server.lost:
                continue
            try:
                self._unload(server, server.adapters(), keep=set())
            except EngineError as error:
                logger.info("adapters were not unloaded: %s", error)

    def _sync(self, version: int, used: set[str]) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()
        new = [server for server in self.servers if not server.prepared]
        due = self.verifier.due(new=bool(new))
        self._verify_base(new, version)
        if self.verifier.canary:
            self._send_canaries([server for server in self.servers if not server.proven])
        proven = time.perf_counter()
        name, sent = self._send(version, used)
        call_all(self.servers, lambda server: verify_version(server, version))
        updated = time.perf_counter()
        if due:
            self._verify(self.servers, version)
            self.verifier.passed()
        return name, {
            "sync/bytes": float(sent),
            "sync/seconds/canary": proven - began,
            "sync/seconds/update": updated - proven,
            "sync/seconds/probe": time.perf_counter() - updated,
        }

    def _send_canaries(self, servers: Sequence[ServerClient]) -> None:
        """Raise EngineError unless new servers, which take no requests yet, follow a canary of each kind of layer.

        vLLM ignores updates that it binds to no layer, and while B is 0 no probe shows it.
        """
        if not servers:
            return
        start = self.policy.score(self.verifier.token_ids)
        for kind, layers in adapter_kinds(self.policy).items():
            for attempt in range(ADAPTER_ATTEMPTS):
                try:
                    self._send_canary(servers, start, kind, layers, attempt)
                    break
                except NotFollowed:
                    if attempt == ADAPTER_ATTEMPTS - 1:
                        raise
        for server in servers:
            server.proven = True

    def _send_canary(
        self, servers: Sequence[ServerClient], start: list[float], kind: str, layers: Layers, attempt: int
    ) -> None:
        """Raise EngineError unless servers follow random updates of one kind of layer."""

        def score() -> list[float]:
            return self.policy.score(self.verifier.token_ids)

        with canary_adapter(self.policy, layers, lambda: mean_gap(start, score()), attempt):
            expected = score()
            if canary_tells(start, expected):
                tensors = self._tensors()
                for scored in call_all(servers, partial(self._score_adapter, kind=kind, tensors=tensors)):
                    self.verifier.verify_followed(scored, expected, start, kind, len(layers))

    def _score_adapter(self, server: ServerClient, kind: str, tensors: dict[str, torch.Tensor]) -> list[float]:
        """The probe's log-probs of an adapter that is loaded for them alone."""
        model, name = server.model, f"{CANARY_ADAPTER}{kind}"
        self._unload(server, server.adapters(), keep={model}, prefix=CANARY_ADAPTER)  # a killed run's
        self._load_adapter(server, name, tensors)
        try:
            server.model = name
            return server.score(self.verifier.token_ids)
        finally:
            server.model = model
            with suppress(EngineError):  # a lost server has none; the next canary or sync unloads what is left
                self._unload(server, server.adapters(), keep={model}, prefix=CANARY_ADAPTER)

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
        folder = self._write(server, tensors)
        try:
            server.load_adapter(name, folder)
        except Refused as error:
            shutil.rmtree(folder)
            raise _explain(error, folder) from error

    def _write(self, server: ServerClient, tensors: dict[str, torch.Tensor]) -> Path:
        """Write a new folder in peft's format into the folder for weights."""
        root, folder = Path(server.endpoint.shm_dir).absolute(), None
        try:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=root))
            write_config(self.policy.model, folder)
            (folder / WEIGHTS).write_bytes(save(tensors))
        except OSError as error:
            if folder:
                shutil.rmtree(folder)
            raise write_error("an adapter", root, error) from error
        return folder

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
        if not new:
            return
        for server in new:
            server.model = MODEL
            server.abandon_update()  # a killed run may have left an update and a pause
            server.resume()
        try:
            with switched_off(self.policy.model):
                self._verify(new, version)
        except ServerGone:
            raise
        except EngineError as error:
            raise EngineError(
                "a server has another base model than the run, or a run without model.lora changed it: start it again "
                f"with the run's model ({error})"
            ) from error

    def _verify(self, servers: Sequence[ServerClient], version: int) -> None:
        """Compare the probe's log-probs; during other requests, those of tokens that the servers sample after it.

        On a CPU vLLM 0.32 crashes when it computes a prompt's log-probs together with another adapter's request.
        """
        if not self.in_flight:
            self.verifier.verify(servers, version)
            return
        start = self.verifier.token_ids
        for ids, scored in call_all(servers, lambda server: server.sample(start, len(start))):
            self.verifier.verify_logprobs(scored, self.policy.score([*start, *ids])[-len(ids) :], version)


def _new_name(version: int, taken: set[str]) -> str:
    """policy-v7, or policy-v7.1 if that name is taken, because vLLM identifies adapters by name."""
    names = chain([f"{ADAPTER}{version}"], (f"{ADAPTER}{version}.{again}" for again in count(1)))
    return next(name for name in names if name not in taken)


def _explain(error: Refused, folder: Path) -> GrpoError:
    """vLLM's refusal of an adapter in terms of the user's keys."""
    if found := re.search(r"expected target modules in (.*?) but received (.*?)\. Please", str(error)):
        return ConfigError(
            f"model.lora.target_modules: vLLM's model takes no updates of {found[2]}; target only {found[1]}"
        )
    if error.status == 404:
        return EngineError(
            f"{error}: with model.lora the server must see {folder.parent} under this same path (sync.folder), and "
            "must have been started for adapters: grpocli vllm-serve lora_rank=..."
        )
    return EngineError(str(error))
