"""Verifies that a server has the trainer's weights: both must give a fixed sequence of tokens the same log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from grpocli.errors import EngineError
from grpocli.rollout.vllm.client import call_all

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, EngineJob
    from grpocli.rollout.vllm.client import ServerClient

PROBE_TOKENS = 32  # the length of the sequence
PROBE_ROOM = 2 * PROBE_TOKENS
"""The least context of a server: the probe, and as many tokens sampled after it (`lora.py`)."""
TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
"""Nats by which the probe's log-probs may differ on average; any single one by `WORST` times as much.

Measured, mean and worst: float32 3e-6 and 1e-5 (a tiny model). bfloat16 0.10 and 0.60 (SmolLM2-135M, the trainer
under autocast with float32 weights; the probe's tokens are improbable, -15 nats, where rounding is coarsest). So
in bfloat16 the probe finds wrong and missing tensors only if they move log-probs by more than 0.25 nats on average.
"""
ON_GPU = {"float32": 2e-2}
"""On a GPU: vLLM's attention in float32 multiplies in TF32, to about 1e-3. Not measured yet."""
QUANTIZED = 0.5
"""For servers that round weights to 8 bits or fewer (engine.quantization). Not measured yet."""
WORST = 10


def tolerance(job: EngineJob, gpu: bool) -> float:
    """Nats by which the probe's log-probs may differ on average if `sync.tolerance` is null."""
    if job.quantized:
        return QUANTIZED
    return ON_GPU.get(job.dtype, TOLERANCE[job.dtype]) if gpu else TOLERANCE[job.dtype]


class WeightVerifier:
    """Verifies the weights of servers, with the same prompt of `PROBE_TOKENS` tokens in every sync of a run.

    token_ids: the prompt. tolerance: nats, see `TOLERANCE`.
    """

    def __init__(self, context: EngineContext) -> None:
        self.policy, sync = context.policy, context.sync
        self.token_ids = probe_prompt(int(self.policy.model.config.get_text_config().vocab_size))
        trains_on_gpu = next(self.policy.model.parameters()).device.type == "cuda"
        usual = tolerance(context.job, gpu=trains_on_gpu or bool(context.job.gpus))
        self.tolerance = usual if sync.tolerance is None else sync.tolerance
        self._every, self._since = sync.verify_every, 0

    def due(self, new: bool = False) -> bool:
        """Whether to verify this sync: the first, then every `sync.verify_every`th, and one with a new server.

        Call it once for each attempt.
        """
        due = new or self._since == 0
        self._since = (1 if due else self._since + 1) % self._every
        return due

    def verify(self, servers: Sequence[ServerClient], version: int, beside_requests: bool = False) -> None:
        """Raise EngineError unless every server's log-probs are the policy's. All servers score concurrently.

        beside_requests: score before the requests that wait at the servers.
        """
        with ThreadPoolExecutor(1) as pool:
            scores = pool.submit(call_all, servers, lambda server: server.score(self.token_ids, first=beside_requests))
            expected = self.policy.score(self.token_ids)
        for scored in scores.result():
            self.verify_logprobs(scored, expected, version)

    def verify_logprobs(self, scored: Sequence[float], expected: Sequence[float], version: int) -> None:
        """Raise EngineError unless a server's log-probs are the trainer's."""
        require_close(scored, expected, self.tolerance, version)


def probe_prompt(vocabulary: int) -> list[int]:
    """The same tokens from all over the vocabulary in every run."""
    return [(1 + i * 2654435761) % vocabulary for i in range(PROBE_TOKENS)]


def require_close(server: Sequence[float], trainer: Sequence[float], tolerance: float, version: int) -> None:
    """Raise EngineError unless the log-probs agree within `tolerance` nats (see `TOLERANCE`); NaN never agrees."""
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
        "or dtype, or quantizes it without engine.quantization; vLLM's loader skipped, renamed or kept a packed copy "
        "of a parameter; another run syncs to the same server"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
