"""A canary: weights unlike the policy's, which a server must follow before it gets the true ones.

The probe's log-probs cannot tell a weight that never arrives from one that has not moved yet: a server that starts with
the run's own model passes with half of its weights unbound, and so does an adapter that vLLM binds to no module while
its B is 0. Under a canary every weight has moved far.

`weights` changes a policy in place, by steps that are exact in floating point, and takes them back bit for bit. Rows
get random signs, and norms that keep the model calm: random signs alone let rounding in bfloat16 grow to nats in a
trained model, whose large activations no longer cancel.

    w'_r = s_r 2^k_r w_r       s_r = +-1, seeded by the weight's name; 2^k_r |w_r| is within sqrt(2) of a fixed norm

`adapter` sets the B of one kind of module, which is 0 at the start of a run, to random signs times a scale.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from grpocli.models.lora import ADAPTER, lora_layers
from grpocli.models.quantization import whole_weight
from grpocli.rollout.vllm.weight_verifier import mean_gap

if TYPE_CHECKING:
    from grpocli.rollout.engine import PolicyView

logger = logging.getLogger(__name__)

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


def tells(start: Sequence[float], changed: Sequence[float]) -> bool:
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


# All weights


@contextmanager
def weights(policy: PolicyView) -> Iterator[None]:
    """A block in which the policy has the canary's weights. Afterwards it has its own again, bit for bit.

    Every process enters it; each changes the part that it holds. Collective under ZeRO-3 only, which gathers a weight
    at a time for the norms of its rows.
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


# An adapter


def adapter_kinds(policy: PolicyView) -> dict[str, list[tuple[str, Any]]]:
    """The layers with an update by the last part of their names: q_proj, down_proj ..."""
    kinds: dict[str, list[tuple[str, Any]]] = {}
    for name, layer in lora_layers(policy.model):
        kinds.setdefault(name.rpartition(".")[2], []).append((name, layer))
    return kinds


@contextmanager
def adapter(
    policy: PolicyView, layers: Sequence[tuple[str, Any]], move: Callable[[], float], attempt: int = 0
) -> Iterator[float]:
    """A block in which B of these layers is random and large enough to move the probe by `MOVED` nats, if it can.

    move: how far the trainer's probe has moved, in nats. Yields that. attempt: each is random anew. Afterwards B has
    its own values, bit for bit.
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
