"""The config group `sync`: how weights reach a vLLM server, and how often they are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from grpocli.config.parts import part, require, section
from grpocli.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerLocation:
    """The location of the servers relative to the trainer."""

    gpu: bool
    """The trainer computes on GPUs."""
    local: bool = True
    """The servers are on this machine."""
    shared: bool | None = False
    """True if every GPU of the servers is a trainer's too, False if none is, None if some are."""


def locate_servers(
    device: str, urls: Sequence[str] = (), shared: bool | None = False, nodes: int = 0
) -> ServerLocation:
    """The location of the servers at `urls`, or of those that the run starts on this machine or on rollout nodes.

    device: the trainer's, "auto", "cpu" or "cuda". shared: of the run's own servers here.
    """
    import torch

    from grpocli.http import is_loopback

    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local = not nodes and all(is_loopback(urlsplit(url).hostname or "") for url in urls)
    return ServerLocation(gpu, local, False if urls or nodes else shared)


NEEDS_GPUS = "needs GPUs, and the trainer computes on a CPU: take sync=shm"


@section("sync")
class SyncConfig:
    """How weights reach a vLLM server."""

    bucket_mb: int = 128
    """MiB that are sent at a time; at most two buckets are in memory beside the model."""
    tolerance: float | None = None
    """Largest mean difference of the server's log-probs from the trainer's, in nats; null: the value for the dtype
    (`grpocli.rollout.vllm.weight_sync.TOLERANCE`)."""
    canary: bool = True
    """With LoRA, send a new server other adapters first, which its log-probs must follow."""

    def __post_init__(self) -> None:
        require(self, "bucket_mb", self.bucket_mb >= 1, "must be at least 1")
        require(self, "tolerance", self.tolerance is None or self.tolerance > 0, "must be above 0")

    folder: ClassVar[str | None] = None

    def choose(self, servers: ServerLocation) -> str:
        """The transport: "shm", "nccl" or "ipc". Raises ConfigError for a choice that cannot work there."""
        return "shm"


@part("sync", "auto")
class AutoSyncConfig(SyncConfig):
    """The transport that fits: shm on a CPU; ipc if the server shares the trainer's GPUs; nccl to other GPUs.

    ipc and nccl are tested with stand-ins, not yet on a GPU.
    """

    def choose(self, servers: ServerLocation) -> str:
        if not servers.gpu or servers.shared is None:
            return "shm"
        return "ipc" if servers.shared else "nccl"


@part("sync", "shm")
class ShmSyncConfig(SyncConfig):
    """Safetensors files in shared memory on one machine, or in a folder that two machines share."""

    folder: str | None = None  # type: ignore[misc]
    """The shared folder, as this machine sees it; null: the server's."""


@part("sync", "nccl")
class NcclSyncConfig(SyncConfig):
    """vLLM's broadcast from GPU to GPU, on one machine or several; the server's GPUs are others than the trainer's."""

    def choose(self, servers: ServerLocation) -> str:
        if not servers.gpu:
            raise ConfigError(NEEDS_GPUS, key="sync", value="nccl")
        if servers.shared is not False:
            problem = "NCCL connects no GPU with itself, and the server is on the trainer's: take sync=ipc or sync=shm"
            raise ConfigError(problem, key="sync", value="nccl")
        return "nccl"


@part("sync", "ipc")
class IpcSyncConfig(SyncConfig):
    """vLLM's CUDA IPC between processes that share GPUs: nothing is copied between devices."""

    def choose(self, servers: ServerLocation) -> str:
        problem = ""
        if not servers.gpu:
            problem = NEEDS_GPUS
        elif not servers.local:
            problem = "the server is not on this machine (engine.base_url): take sync=nccl or sync=shm"
        elif servers.shared is None:
            problem = "the server has GPUs without a trainer process: raise hardware.processes or take sync=shm"
        if problem:
            raise ConfigError(problem, key="sync", value="ipc")
        return "ipc"
