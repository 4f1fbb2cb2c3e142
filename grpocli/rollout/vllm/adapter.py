"""LoRA with a vLLM server: each version of the updates goes over as an adapter; the base weights stay as they are."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from grpocli.errors import ConfigError, EngineError, GrpoError
from grpocli.models.lora import WEIGHTS, adapter_tensors, switched_off, write_config
from grpocli.rollout.vllm.probe import Probe
from grpocli.rollout.vllm.protocol import ADAPTER, MODEL, Refused, ServerGone
from grpocli.rollout.vllm.sync import compare_versions
from grpocli.rollout.vllm.transport import each

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, EngineJob
    from grpocli.rollout.vllm.protocol import Server

logger = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started for; an adapter may have any rank up to it."""
KEPT = 2
"""Adapters in the server's memory: the one sampled from, and the one that requests under way may still use."""
FOLDER = "adapter-"


def lora_flags(rank: int, dtype: str, cpu: bool) -> dict[str, Any]:
    """The options a server needs for adapters of this rank (none for 0). Raises ConfigError where vLLM has no such."""
    if rank == 0:
        return {}
    if rank > RANKS[-1]:
        raise ConfigError(f"vLLM serves ranks up to {RANKS[-1]}: lower it", key="model.lora.rank", value=rank)
    if dtype == "float32" and not cpu:
        problem = "vLLM's LoRA kernels on a GPU compute in bfloat16 or float16: take bfloat16, or engine=transformers"
        raise ConfigError(problem, key="model.dtype", value=dtype)
    fits = next(size for size in RANKS if size >= rank)
    return {"enable-lora": True, "max-lora-rank": fits, "max-loras": KEPT, "max-cpu-loras": KEPT}


def lora_environment(rank: int) -> dict[str, str]:
    """Adapters may be loaded while the server runs (by whoever has its key)."""
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if rank else {}


def lora_misfit(served: dict[str, Any], job: EngineJob) -> str:
    """Why a given server (vLLM's description of it) cannot serve the job's adapters; empty if it can."""
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
    """Called with a version by every trainer process; the main one sends and verifies, all of them fail together.

    A version is a new name and a new folder, and vLLM's prefix cache is keyed by both, so nothing that was computed
    with older updates can be used again. vLLM holds `KEPT` adapters and drops the least recently used; one that is
    asked for again it reads from its folder. So a folder goes only when no request can want it any more.
    """

    def __init__(self, servers: Sequence[Server], context: EngineContext) -> None:
        self.servers, self.policy, self.world = list(servers), context.policy, context.world
        self.in_flight = context.in_flight
        self.dtype: torch.dtype = getattr(torch, context.job.dtype)
        self.probe = Probe(context)

    def __call__(self, version: int) -> dict[str, float]:
        """Raises, in every process alike, EngineError if the adapter cannot be sent or proven, ConfigError if vLLM's
        model takes no such adapter. `sync/seconds/probe` is 0 where no probe was due."""
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
        """A failed sync has let requests go on already: each has the adapter that it asks for, and its version."""

    def close(self) -> None:
        """Take this run's adapters out of the servers that are still there, and out of their folders."""
        if not self.world.is_main:
            return
        for server in self.servers:
            if server.lost:
                continue
            try:
                self._retire(server, server.adapters(), keep=set())
            except EngineError as error:
                logger.info("no adapters to take out: %s", error)

    def _sync(self, version: int, used: set[str]) -> tuple[str, dict[str, float]]:
        """The name of the new adapter, which every server has."""
        began = time.perf_counter()
        new = [server for server in self.servers if not server.prepared]
        due = self.probe.due(new=bool(new))
        self._check_base(new, version)
        name, sent = self._send(version, used)
        each(self.servers, lambda server: compare_versions(server, version))
        updated = time.perf_counter()
        if due:
            self._compare(self.servers, version)
        seconds = {"sync/seconds/update": updated - began, "sync/seconds/probe": time.perf_counter() - updated}
        return name, {"sync/bytes": float(sent), **seconds}

    def _send(self, version: int, used: set[str]) -> tuple[str, int]:
        """Bring every server to a new adapter; its name and its bytes."""
        tensors = self._tensors()
        each(self.servers, lambda server: server.weight_version())  # raises where another run has changed them
        loaded = each(self.servers, lambda server: server.adapters())
        name = _new_name(version, {name for adapters in loaded for name in adapters})
        try:
            self._pause()
            each(self.servers, lambda server: self._load(server, name, version, tensors))
        except GrpoError:
            with suppress(EngineError):  # of a server that is gone; what went wrong before it is the cause to tell
                self._resume()
            raise
        self._resume()
        for server, adapters in zip(self.servers, loaded, strict=True):
            self._retire(server, adapters, keep={server.model, *used})
            server.model = name
        return name, sum(tensor.nbytes for tensor in tensors.values())

    def _pause(self) -> None:
        """Requests under way end first; unless weights may change in flight: then each keeps the adapter it has."""
        if not self.in_flight:
            each(self.servers, lambda server: server.pause("wait"))

    def _resume(self) -> None:
        if not self.in_flight:
            each(self.servers, lambda server: server.resume())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """In the server's dtype: vLLM would cast to it anyway, so it computes with the same numbers, and in bfloat16
        half the bytes go over."""
        named = adapter_tensors(self.policy.model)
        return {name: tensor.detach().to("cpu", self.dtype).contiguous() for name, tensor in named}

    def _load(self, server: Server, name: str, version: int, tensors: dict[str, torch.Tensor]) -> None:
        folder = self._write(server, tensors)
        try:
            server.load_adapter(name, folder)
        except Refused as error:
            shutil.rmtree(folder)
            raise _explained(error, folder) from error
        server.set_version(version)

    def _write(self, server: Server, tensors: dict[str, torch.Tensor]) -> Path:
        """A new folder in peft's format, beside where weights would go."""
        root, folder = Path(server.endpoint.shm_dir).absolute(), None
        try:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=root))
            write_config(self.policy.model, folder)
            (folder / WEIGHTS).write_bytes(save(tensors))
        except OSError as error:
            if folder:
                shutil.rmtree(folder)
            raise EngineError(
                f"cannot write an adapter to {root}: {error.strerror}; make room there, or give the server another "
                "folder with sync=shm sync.folder="
            ) from error
        return folder

    def _retire(self, server: Server, adapters: dict[str, Path], keep: set[str]) -> None:
        """Unload and delete what no request can still want, this run's or one's before it."""
        root = Path(server.endpoint.shm_dir).absolute()
        for name, folder in adapters.items():
            if name in keep or not name.startswith(ADAPTER):
                continue
            server.unload_adapter(name)
            if folder.parent == root and folder.name.startswith(FOLDER):
                shutil.rmtree(folder, ignore_errors=True)  # what stays goes with the server's folder

    def _check_base(self, new: Sequence[Server], version: int) -> None:
        """An update of other base weights is worth nothing; a server is asked once."""
        if not new:
            return
        for server in new:
            server.model = MODEL
            server.abandon_update()  # by a run that was killed, as the pause
            server.resume()
        try:
            with switched_off(self.policy.model):
                self._compare(new, version)
        except ServerGone:
            raise
        except EngineError as error:
            raise EngineError(
                "a server has another base model than the run, or a run without model.lora changed it: start it again "
                f"with the run's model ({error})"
            ) from error

    def _compare(self, servers: Sequence[Server], version: int) -> None:
        """The probe's log-probs. Beside other requests, what the servers sample after it: on a CPU vLLM 0.32 dies of
        log-probs of a prompt that it computes together with another request of an adapter."""
        if not self.in_flight:
            self.probe.check(servers, version)
            return
        start = self.probe.token_ids
        for ids, scored in each(servers, lambda server: server.sample(start, len(start))):
            self.probe.compare(scored, self.policy.score([*start, *ids])[-len(ids) :], version)


def _new_name(version: int, taken: set[str]) -> str:
    """policy-v7; policy-v7.1 where that is there already, since vLLM tells adapters apart by their names."""
    name, again = f"{ADAPTER}{version}", 0
    while name in taken:
        again += 1
        name = f"{ADAPTER}{version}.{again}"
    return name


def _explained(error: Refused, folder: Path) -> GrpoError:
    """What vLLM's refusal of an adapter means for the user."""
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
