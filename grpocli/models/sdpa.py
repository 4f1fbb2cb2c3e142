"""One call of `sdpa`, causal or by a mask, as it is fast on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

MANY_QUERIES, MANY_KEYS = 256, 512
"""On a CPU a call that has as many is faster in bfloat16; a smaller one in float32."""
STEP = 64
"""A call in bfloat16 on a CPU has multiples of it."""

MASKED = 512
"""On a CPU a mask is faster than twice the queries, up to so many of them."""

Kernel = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""query [R, heads, N, D], key and value [R, heads / groups, M, D], mask [N, M] -> [R, heads, N, D], the dtype kept.

Without a mask it is causal. A mask is of bools, or is added to the scores.
"""


def prefers_causal(queries: int, on_cpu: bool) -> bool:
    """Whether so many queries and the prompt's before them, causal, cost less than they alone with a mask."""
    return not on_cpu or queries > MASKED


def on_gpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, groups: int, how: dict[str, Any]) -> Tensor:
    """Grouped keys are repeated: with a mask and groups, `sdpa` would take its slowest kernel."""
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, **how)


def on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    groups: int,
    low: torch.dtype,
    how: dict[str, Any],
) -> Tensor:
    """In float32, or in `low` where that is bfloat16 and there is much to do.

    In bfloat16 each new length compiles kernels of 5 MB that are never freed: so there are few lengths. Nobody attends
    to what fills them up.
    """
    given, asked, dtype = query.dtype, query.shape[2], torch.float32
    if low == torch.bfloat16 and asked >= MANY_QUERIES and key.shape[2] >= MANY_KEYS:
        dtype, queries, keys = low, -asked % STEP, -key.shape[2] % STEP
        query, key, value = _filled(query, queries), _filled(key, keys), _filled(value, keys)
        if mask is not None:
            mask = torch.nn.functional.pad(_filled(mask, queries), (0, keys), value=float("-inf"))
    if mask is not None:
        mask = mask.to(dtype)  # 0 and -inf survive it, as they do when FSDP2 casts what a model is called with
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    how = how | {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": groups > 1}
    out: Tensor = scaled_dot_product_attention(query, key, value, **how)
    return out[..., :asked, :].to(given)


def _filled(states: Tensor, more: int) -> Tensor:
    """With so many more places [..., N, D], zeros."""
    return torch.nn.functional.pad(states, (0, 0, 0, more)) if more else states
