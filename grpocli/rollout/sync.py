"""How weights get from the trainer to a vLLM server, and how that is proven: the config group `sync`."""

from __future__ import annotations

from typing import ClassVar

from grpocli.config.parts import part, require, section


@section("sync")
class Sync:
    """verify_every: steps between probes of the server's log-probs (the version is compared at every sync).

    bucket_mb: MiB that are sent at a time; the peak above the model is about one bucket.
    tolerance: nats by which the server's log-probs may differ from the trainer's on average; null takes what fits
        the dtype (`grpocli.rollout.vllm.sync.TOLERANCE`).
    """

    verify_every: int = 1
    bucket_mb: int = 512
    tolerance: float | None = None

    def __post_init__(self) -> None:
        require(self, "verify_every", self.verify_every >= 1, "must be at least 1: every sync")
        require(self, "bucket_mb", self.bucket_mb >= 1, "must be at least 1")
        require(self, "tolerance", self.tolerance is None or self.tolerance > 0, "must be above 0")

    folder: ClassVar[str | None] = None

    def transport(self, device: str) -> str:
        """ "shm", "nccl" or "ipc", for a trainer on `device` ("cpu", "cuda")."""
        return "shm"


@part("sync", "auto")
class Auto(Sync):
    """The transport that fits: shm on a CPU."""


@part("sync", "shm")
class Shm(Sync):
    """Safetensors files in shared memory on one machine, or in a folder that two machines share.

    folder: that folder, as this machine sees it; null: the server's own.
    """

    folder: str | None = None  # type: ignore[misc]
