"""Calls of torch's scaled_dot_product_attention, causal or with a mask, that are fast on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

MANY_QUERIES, MANY_KEYS = 256, 512
"""On a CPU, calls of at least this size are faster in bfloat16, and smaller ones in float32."""
STEP = 64
"""Lengths of calls in bfloat16 on a CPU are multiples of this."""

MAX_FLASH_HEAD_DIM = 256
"""Largest head dimension of the flash kernel."""
MASKED = 512
"""On a CPU, up to this many queries, a mask is faster than causal attention with the prompt's queries repeated."""

Kernel = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""query [R, heads, N, D], key and value [R, heads / groups, M, D], mask [R or 1, 1, N, M] -> [R, heads, N, D].

Without a mask, attention is causal. A mask has values to add to the scores, for each row or for all.
"""


@cache
def before_ampere(device: torch.device) -> bool:
    """Whether a GPU has no flash kernel."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)


def on_gpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, groups: int, how: dict[str, Any]) -> Tensor:
    """Attention on a GPU. Grouped keys are repeated where `sdpa` would take its slowest kernel for them.

    Only the flash kernel has groups: it takes no mask, no float32, no head larger than MAX_FLASH_HEAD_DIM, and no GPU
    before Ampere.
    """
    flash = mask is None and query.dtype != torch.float32 and query.shape[3] <= MAX_FLASH_HEAD_DIM
    flash = flash and not before_ampere(query.device)
    if groups > 1 and not flash:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    how = how | {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": groups > 1 and flash}
    out: Tensor = scaled_dot_product_attention(query, key, value, **how)
    return out


def on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    groups: int,
    low: torch.dtype,
    how: dict[str, Any],
) -> Tensor:
    """Attention on a CPU, in float32; large calls in `low` if that is bfloat16.

    In bfloat16 each new length compiles kernels of 5 MB that are never freed, so lengths are padded to multiples of
    STEP. No token attends to padding.
    """
    given, n_queries, dtype = query.dtype, query.shape[2], torch.float32
    if low == torch.bfloat16 and n_queries >= MANY_QUERIES and key.shape[2] >= MANY_KEYS:
        dtype, queries, keys = low, -n_queries % STEP, -key.shape[2] % STEP
        query, key, value = _padded(query, queries), _padded(key, keys), _padded(value, keys)
        if mask is not None:
            mask = torch.nn.functional.pad(_padded(mask, queries), (0, keys), value=float("-inf"))
    if mask is not None:
        mask = mask.to(dtype)  # 0 and -inf are exact in every dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    how = how | {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": groups > 1}
    out: Tensor = scaled_dot_product_attention(query, key, value, **how)
    return out[..., :n_queries, :].to(given)


def _padded(states: Tensor, more: int) -> Tensor:
    """Append `more` zeros to states [..., N, D]: [..., N + more, D]."""
    return torch.nn.functional.pad(states, (0, 0, 0, more)) if more else states
