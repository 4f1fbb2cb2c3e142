"""Verifies that a server has the trainer's weights: both must give a fixed sequence of tokens the same log-probs.

The probe cannot tell a weight that never arrives from one that has not moved yet: a server that starts with the run's
own model passes with half of its weights unbound, and so does an adapter that vLLM binds to no module while its B is 0.
So a new server must first follow a canary, in which every weight has moved far.

`canary_weights` changes a policy in place, by steps that are exact in floating point, and takes them back bit for bit.
Rows get random signs, and norms that keep the model calm: random signs alone let rounding in bfloat16 grow to nats in a
trained model, whose large activations no longer cancel.

    w'_r = s_r 2^k_r w_r       s_r = +-1, seeded by the weight's name; 2^k_r |w_r| is within sqrt(2) of a fixed norm

`canary_adapter` sets the B of one kind of module, which is 0 at the start of a run, to random signs times a scale.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import EngineError
from grpocli.models.lora import ADAPTER, lora_layers
from grpocli.models.quantization import whole_weight
from grpocli.rollout.vllm.client import call_all

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, EngineJob, PolicyView
    from grpocli.rollout.vllm.client import ServerClient

logger = logging.getLogger(__name__)

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
FLOAT32_ON_GPU = 2e-2
"""vLLM's attention in float32 multiplies in TF32, to about 1e-3. Not measured yet."""
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
LEAST = 0.01
"""Nats that a canary must move the trainer's probe on average; it is not sent otherwise."""
MOVED = 2.0
"""Nats by which an adapter's canary moves the trainer's probe on average, where the model can be moved as far."""
ROW_NORM, HEAD_NORM, ELEMENT = 0.5, 5.0, 1.0
"""Norms of the rows of matrices and of embeddings and heads; the size of a vector's elements (norms, biases).

Each block then adds about as much as any other, attention is soft, and logits have a standard deviation of several
nats. Measured on SmolLM2-135M in docs/vllm.md.
"""
MAX_POWER = 60
"""The largest power of two by which a row is scaled, up or down."""
SMALLEST = 2.0**-66
"""A row with a smaller element is not scaled down: by 2^-MAX_POWER
it would be subnormal (below 2^-126) and lose bits."""
CHUNK = 2**22  # elements whose sizes are looked at together
LARGEST_SHARE, TRIES = 16.0, 6


def tolerance(job: EngineJob, gpu: bool) -> float:
    """Nats by which the probe's log-probs may differ on average if `sync.tolerance` is null."""
    if job.quantized:
        return QUANTIZED
    return FLOAT32_ON_GPU if gpu and job.dtype == "float32" else TOLERANCE[job.dtype]


class NotFollowed(EngineError):
    """A server has not followed a canary."""


class WeightVerifier:
    """Verifies the weights of servers, with the same prompt `token_ids` in every sync. tolerance: nats."""

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

    def verify_followed(
        self, scored: Sequence[float], expected: Sequence[float], start: Sequence[float], kind: str = "", count: int = 0
    ) -> None:
        """Raise EngineError unless a server has followed a canary.

        start: the log-probs of the trainer's own weights. kind, count: of layers with random updates; "": all weights.
        """
        if not kind:
            limit = min(self.tolerance, FOLLOWED * mean_gap(start, expected))
            require_followed(scored, expected, start, limit, CANARY, CAUSES, mean_gap)
            return
        limit = min(ADAPTER_ROUNDING * self.tolerance, ADAPTER_FOLLOWED * median_gap(start, expected))
        changed, causes = f"random updates of the {count} layers called {kind}", ADAPTER_CAUSES.format(kind=kind)
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

    start: the trainer's with its own weights. changed: the canary in words. gap: the difference of two sequences.
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
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return gaps if all(map(math.isfinite, gaps)) else [math.inf] * len(gaps)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def canary_tells(start: Sequence[float], changed: Sequence[float]) -> bool:
    """Whether a canary moves the trainer's probe enough to prove anything; warns if it does not."""
    movement = mean_gap(start, changed) if start else math.inf
    if start and not LEAST <= movement < math.inf:
        logger.warning(
            "the canary of the first sync moves the trainer's own probe by %s nats, so it proves nothing about this "
            "model: syncs are verified by the probe of the true weights alone",
            f"{movement:.2g}",
        )
        return False
    return True


# A canary of all weights


@contextmanager
def canary_weights(policy: PolicyView) -> Iterator[None]:
    """A block in which the policy has the canary's weights. Afterwards it has its own again, bit for bit.

    Every process enters it, and changes the part that it holds. Collective under ZeRO-3, which gathers weights.
    """
    _reshard(policy.model)
    heads = _heads(policy.model)
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if parameter.is_floating_point() and ".lora_" not in name:
                    target = HEAD_NORM if id(parameter) in heads else ROW_NORM
                    part, factors = _part(name, parameter, target)
                    part.mul_(factors)
                    changed.append((part, factors))
        yield
    finally:
        _reshard(policy.model)
        with torch.no_grad():
            for part, factors in changed:
                part.mul_(factors.reciprocal())  # exact: a factor is a power of two with a sign


def _reshard(model: Any) -> None:
    """Drop whole copies that FSDP2 and ZeRO-3 keep after a forward: a change of the shards would not reach them."""
    for parameter in model.parameters():
        if hasattr(parameter, "ds_shape") and parameter.ds_status.name == "AVAILABLE":
            parameter.partition()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def _heads(model: Any) -> set[int]:
    """The weights of the embedding and of the output head."""
    getters = (getattr(model, name, lambda: None) for name in ("get_input_embeddings", "get_output_embeddings"))
    return {id(getattr(get(), "weight", None)) for get in getters}


def _part(name: str, parameter: Any, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a parameter in this process, and the factors that it is multiplied with."""
    if hasattr(parameter, "ds_shape"):
        return _flat_part(name, parameter, target)
    if not hasattr(parameter, "to_local"):
        return parameter.data, _factors(parameter.data, _random_signs(name, _rows(parameter.shape)), target)
    local = parameter.to_local()  # FSDP2: the same number of rows in each process, the last get fewer
    signs = _random_signs(name, _rows(parameter.shape))
    if local.shape != parameter.shape:
        each = -(-parameter.shape[0] // parameter.device_mesh.size())
        start = min(parameter.device_mesh.get_local_rank() * each, parameter.shape[0])
        signs = signs[start : start + local.shape[0]]
    return local, _factors(local, signs, target)


def _flat_part(name: str, parameter: Any, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ZeRO-3: a process holds a range of the flat weight, with padding after the last."""
    import deepspeed

    flat = parameter.ds_tensor
    with deepspeed.zero.GatheredParameters([parameter]):
        factors = _factors(parameter.data, _random_signs(name, _rows(parameter.ds_shape)), target)
        row = parameter.shape[-1] if parameter.dim() > 1 else 1
    start, elements = flat.numel() * torch.distributed.get_rank(), factors.numel() * row
    at = torch.arange(start, start + flat.numel(), device=flat.device).clamp_(max=elements - 1) // row
    return flat, factors.reshape(-1)[at].view_as(flat)


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a factor for each row of a weight, and for each element of a vector."""
    return tuple(shape[:-1]) if len(shape) > 1 else tuple(shape)


def _factors(weight: torch.Tensor, signs: torch.Tensor, target: float) -> torch.Tensor:
    """Signed powers of two that bring the rows of a weight near the norm `target`, to multiply it with."""
    signs = signs.to(weight.device)
    matrix = weight.dim() > 1
    if not weight.numel():
        return signs.unsqueeze(-1) if matrix else signs
    norms = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32) if matrix else weight.abs().float()
    powers = torch.exp2(torch.log2((target if matrix else ELEMENT) / norms).round_().clamp_(-MAX_POWER, MAX_POWER))
    powers = torch.where(torch.isfinite(norms) & (norms > 0), powers, 1.0)
    powers = torch.where(_has_tiny(weight), powers.clamp(min=1.0), powers)
    factors = (signs * powers).to(weight.dtype)
    return factors.unsqueeze(-1) if matrix else factors


def _has_tiny(weight: torch.Tensor) -> torch.Tensor:
    """The rows with an element that is not 0 and below SMALLEST."""
    if weight.dim() == 1 or not weight.dim():
        return (weight != 0) & (weight.abs() < SMALLEST)
    rows = weight.reshape(-1, weight.shape[-1])
    found = [((p != 0) & (p.abs() < SMALLEST)).any(-1) for p in rows.split(max(1, CHUNK // rows.shape[1]))]
    return torch.cat(found).view(_rows(weight.shape))


# A canary of an adapter


Layers = Sequence[tuple[str, Any]]
"""Layers with an update, by name."""


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
    b_weights = [layer.lora_B[ADAPTER].weight for _, layer in layers]
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
    """A random B with which the update is about as large as the layer's weight."""
    a, b = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight
    signs = _random_signs(seed_text, b.shape).to(b.device, b.dtype)
    size = whole_weight(layer.base_layer).float().norm() / (a.norm() * math.sqrt(b.shape[0]) * layer.scaling[ADAPTER])
    return signs * (size if torch.isfinite(size) and size > 0 else 1.0)


def _random_signs(seed_text: str, shape: Sequence[int]) -> torch.Tensor:
    """+1 or -1 for each element, the same for the same text."""
    seed = torch.Generator().manual_seed(zlib.crc32(seed_text.encode()))
    return torch.randint(0, 2, tuple(shape), generator=seed, dtype=torch.float32).mul_(2).sub_(1)
