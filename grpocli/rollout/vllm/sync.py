"""The trainer's side of the `shm` transport, and the proof that the server has the trainer's weights."""

from __future__ import annotations

import errno
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpocli.errors import EngineError
from grpocli.rollout.vllm.client import Client
from grpocli.rollout.vllm.weights import BUCKET, buckets, write

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext

PROBE_TOKENS = 32
TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
"""Nats by which the probe's log-probs may differ on average; any single one by `WORST` times as much.

Measured, mean and worst: float32 3e-6 and 1e-5 (a tiny model). bfloat16 0.10 and 0.60 (SmolLM2-135M, the trainer
under autocast with float32 weights; the probe's tokens are improbable, -15 nats, where rounding is coarsest). So
in bfloat16 the check sees wrong, missing or stale tensors, but not a step smaller than the rounding.
"""
WORST = 10


class WeightSync:
    """Called with a version by every trainer process; the main one sends and verifies, all of them fail together."""

    def __init__(self, client: Client, context: EngineContext, tolerance: float | None) -> None:
        self.client, self.policy, self.world = client, context.policy, context.world
        self.dtype: torch.dtype = getattr(torch, context.job.dtype)
        self.tolerance = TOLERANCE[context.job.dtype] if tolerance is None else tolerance
        self.folder = Path(client.endpoint.shm_dir)
        self.probe = probe(int(self.policy.model.config.get_text_config().vocab_size))
        self.bucket = BUCKET
        self._ready = False

    def __call__(self, version: int) -> dict[str, float]:
        """Raises EngineError in every process if the weights cannot be sent or proven."""
        sent, failure = 0, ""
        if self.world.is_main:
            try:
                sent = self._send(version)
                self._verify(version)
            except EngineError as error:
                failure = str(error)
        failure = self.world.broadcast_object(failure)
        if failure:
            raise EngineError(failure)
        return {"sync/bytes": float(self.world.broadcast_object(sent))}

    def _send(self, version: int) -> int:
        """Pause, replace the weights, forget what was computed with the old ones, resume; return the bytes sent."""
        if not self._ready:
            self.client.init_transfer()
            self._ready = True
        self.client.pause()
        try:
            self.client.start_update()
            sent = sum(self._send_bucket(bucket) for bucket in buckets(self.policy.weights(), self.dtype, self.bucket))
            self.client.finish_update(version)
            self.client.reset_prefix_cache()
        finally:
            self.client.resume()
        return sent

    def _send_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> int:
        path = self.folder / f"weights-{secrets.token_hex(8)}.safetensors"
        try:
            size = write(path, bucket, self.dtype)
            self.client.update(path.name)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise EngineError(
                f"cannot write weights to {self.folder}: {error.strerror}"
                + ("; make room there, or give the server another folder with sync=shm sync.folder=" if full else "")
            ) from error
        finally:
            path.unlink(missing_ok=True)
        return size

    def _verify(self, version: int) -> None:
        echoed = self.client.weight_version()
        if echoed != str(version):
            raise EngineError(f"after a sync the vLLM server has weight version {echoed}, the trainer {version}")
        compare(self.client.score(self.probe), self.policy.score(self.probe), self.tolerance, version)


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
