"""Verifies that a server has the trainer's weights: both must give a fixed sequence of tokens the same log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING

from grpocli.errors import EngineError
from grpocli.rollout.vllm.client import call_all

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, EngineJob
    from grpocli.rollout.vllm.client import ServerClient

PROBE_TOKENS = 32  # the length of the sequence
PROBE_ROOM = 2 * PROBE_TOKENS
"""The least context of a server: the probe, and as many tokens sampled after it (`lora.py`)."""
TOLERANCE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
"""Nats by which the probe's log-probs may differ on average; any single one by `WORST` times as much.

Measured, mean and worst: float32 3e-6 and 1e-5 (a tiny model). bfloat16 0.10 and 0.60 (SmolLM2-135M, the trainer
under autocast with float32 weights; the probe's tokens are improbable, -15 nats, where rounding is coarsest), float16
0.013 and 0.12 (the same). So in bfloat16 the probe finds wrong and missing tensors only if they move log-probs by more
than 0.25 nats on average, in float16 by 0.03.
"""
ON_GPU = {"float32": 2e-2}
"""On a GPU: vLLM's attention in float32 multiplies in TF32, to about 1e-3. Not measured yet."""
QUANTIZED = 0.5
"""For servers that round weights to 8 bits or fewer (engine.quantization). Not measured yet."""
WORST = 10
FOLLOWED = 1 / 4
"""The largest share of a canary's movement by which a server may miss it, if that is less than the tolerance."""
CANARY = "other signs and sizes of the rows of all weights"
CAUSES = (
    "a parameter that vLLM's loader skips or renames, a packed copy of old weights, fused weights in another order, "
    "a cache that is kept"
)
ADAPTER_FOLLOWED, ADAPTER_ROUNDING = 1 / 3, 8
"""The same for the canary of an adapter, by the median, and the factor of the tolerance.

The base model stays as it is, so bfloat16 moves single tokens by nats. Measured on SmolLM2-135M, 21 adapters: by 3 to
18 % of the movement in the median, and by 35 % for one; on average by up to 57 %. So there are attempts.
"""
ADAPTER_ATTEMPTS = 5
"""Canaries of one kind of layer, each with another random B, that a server must miss before it is refused."""
ADAPTER_CAUSES = (
    "vLLM binds the adapter to no {kind} (its own names differ, or it fuses them with layers that have no update: "
    "model.lora.target_modules), ignores its scale, or keeps an older adapter"
)
LONG, SAMPLED = 200, 8
"""A prompt that fills a block of vLLM's prefix cache (128 tokens on a CPU) if contexts are long enough, and the tokens
sampled after it: their log-probs show keys and values of older weights, which a probe never reads."""


def tolerance(job: EngineJob, gpu: bool) -> float:
    """Nats by which the probe's log-probs may differ on average if `sync.tolerance` is null."""
    if job.quantized:
        return QUANTIZED
    return ON_GPU.get(job.dtype, TOLERANCE[job.dtype]) if gpu else TOLERANCE[job.dtype]


class NotFollowed(EngineError):
    """A server has not followed a canary."""


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
        self.canary = sync.canary
        room = max(context.job.max_tokens, PROBE_ROOM)
        self.long_prompt = [*reversed(self.token_ids)] * (LONG // PROBE_TOKENS + 1)
        self.long_prompt = self.long_prompt[: min(LONG, room - SAMPLED)]

    def due(self, new: bool = False) -> bool:
        """Whether to verify this sync: the first, then every `sync.verify_every`th, and one with a new server.

        Call it once for each attempt. A due sync that fails leaves the next attempt due; `passed` ends that.
        """
        due = new or self._since == 0
        self._since = 0 if due else (self._since + 1) % self._every
        return due

    def passed(self) -> None:
        """Count from this sync, which was due and is verified, to the next one that is due."""
        self._since = 1 % self._every

    def verify(self, servers: Sequence[ServerClient], version: int, beside_requests: bool = False) -> None:
        """Raise EngineError unless every server's log-probs are the policy's. All servers score concurrently.

        beside_requests: score before the requests that wait at the servers.
        """
        with ThreadPoolExecutor(1) as pool:
            scores = pool.submit(call_all, servers, lambda server: server.score(self.token_ids, first=beside_requests))
            expected = self.policy.score(self.token_ids)
        for scored in scores.result():
            self.verify_logprobs(scored, expected, version)

    def verify_logprobs(self, scored: Sequence[float], expected: Sequence[float], version: int | str) -> None:
        """Raise EngineError unless a server's log-probs are the trainer's."""
        require_close(scored, expected, self.tolerance, version)

    def verify_followed(self, scored: Sequence[float], expected: Sequence[float], start: Sequence[float]) -> None:
        """Raise EngineError unless a server has followed the canary of all weights.

        start: the log-probs of the trainer's own weights.
        """
        limit = min(self.tolerance, FOLLOWED * mean_gap(start, expected))
        require_followed(scored, expected, start, limit, CANARY, CAUSES, mean_gap)

    def verify_adapter_followed(
        self, scored: Sequence[float], expected: Sequence[float], start: Sequence[float], kind: str, layers: int
    ) -> None:
        """Raise EngineError unless a server has followed the canary of the adapters of one kind of layer.

        start: the log-probs of the trainer's own adapter.
        """
        limit = min(ADAPTER_ROUNDING * self.tolerance, ADAPTER_FOLLOWED * median_gap(start, expected))
        changed, causes = f"random updates of the {layers} layers called {kind}", ADAPTER_CAUSES.format(kind=kind)
        require_followed(scored, expected, start, limit, changed, causes, median_gap)

    def verify_sampled(
        self, sample: Callable[[Sequence[int], int], tuple[list[int], list[float]]], version: int | str
    ) -> None:
        """Raise EngineError unless tokens that a server samples after the long prompt have the trainer's log-probs.

        sample: the server's. If it fails, the trainer scores other tokens, since that may be collective.
        """
        failure: EngineError | None = None
        ids, scored = list[int](), list[float]()
        try:
            ids, scored = sample(self.long_prompt, SAMPLED)
        except EngineError as error:
            failure = error
        expected = self.score_sampled(ids)
        if failure:
            raise failure
        self.verify_logprobs(scored, expected, version)

    def score_sampled(self, ids: Sequence[int]) -> list[float]:
        """The trainer's log-probs of tokens after the long prompt."""
        tokens = ids or [0] * SAMPLED
        return self.policy.score([*self.long_prompt, *tokens])[-len(tokens) :]


def probe_prompt(vocabulary: int) -> list[int]:
    """The same tokens from all over the vocabulary in every run."""
    return [(1 + i * 2654435761) % vocabulary for i in range(PROBE_TOKENS)]


def require_close(server: Sequence[float], trainer: Sequence[float], tolerance: float, version: int | str) -> None:
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


def require_followed(
    server: Sequence[float],
    trainer: Sequence[float],
    start: Sequence[float],
    limit: float,
    changed: str,
    causes: str,
    gap: Callable[[Sequence[float], Sequence[float]], float],
) -> None:
    """Raise EngineError unless the server's log-probs are within `limit` nats of the trainer's under a canary.

    start: the trainer's with its own weights. changed: the canary's weights in words. causes: of a difference. gap: the
    difference of two sequences.
    """
    difference = gap(server, trainer)
    if difference <= limit:
        return
    way = [after - before for before, after in zip(start, trainer, strict=True)]
    gone = [after - before for before, after in zip(start, server, strict=True)]
    share = sum(a * b for a, b in zip(gone, way, strict=True)) / max(sum(a * a for a in way), 1e-12)
    followed = f"{share:.0%} of the way" if math.isfinite(share) else "nowhere, its log-probs are not finite"
    typical = "in the median" if gap is median_gap else "on average"
    raise NotFollowed(
        f"the vLLM server does not follow the trainer's weights: a canary, with {changed}, moves the log-probs of the "
        f"trainer's probe by {gap(start, trainer):.3f} nats {typical}; the server went {followed} and differs by "
        f"{difference:.3f} ({limit:.3g} is allowed, see sync.tolerance). Likely causes: {causes}. sync.canary=false "
        "starts without this check"
    )


def mean_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """The mean absolute difference of log-probs in nats; infinite if any is not finite."""
    return _mean(_gaps(a, b))


def median_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """The median absolute difference of log-probs in nats; infinite if any is not finite."""
    return median(_gaps(a, b))


def _gaps(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The absolute differences; all infinite if any is not finite."""
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return gaps if all(map(math.isfinite, gaps)) else [math.inf] * len(gaps)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
