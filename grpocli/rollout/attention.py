"""Decoding attention on a CPU, computed in float32 even under autocast.

With one query per row, bfloat16 `sdpa` takes three to six times as long as float32, and transformers copies grouped
keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SAMPLING_ATTENTION = "sampled_in_float32"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function with the signature that transformers expects.

    query [B, heads, N, D], key and value [B, heads / groups, L, D] -> [B, N, heads, D]. Prompts, and tokens after an
    earlier turn (N > 1), use the usual attention.
    """
    if query.shape[2] > 1 or others.get("position_bias") is not None:
        from grpocli.models.shared_prompt_attention import attend as shared_prompt_attend

        key, value = key.to(query.dtype), value.to(query.dtype)  # keys and values cached in an earlier turn are float32
        return shared_prompt_attend(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    with torch.autocast("cpu", enabled=False):
        out = torch.nn.functional.scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            attn_mask=attention_mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.to(query.dtype).transpose(1, 2), None


@contextmanager
def float32_attention(model: PreTrainedModel) -> Iterator[None]:
    """Replace a CPU model's `sdpa` with `attend` during the block; other models keep their attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from grpocli.models.shared_prompt_attention import NAME as SHARED_PROMPT_ATTENTION

    before = model.config._attn_implementation
    if model.device.type != "cpu" or before not in ("sdpa", SHARED_PROMPT_ATTENTION):
        yield
        return
    AttentionInterface.register(SAMPLING_ATTENTION, attend)
    AttentionMaskInterface.register(SAMPLING_ATTENTION, sdpa_mask)
    model.set_attn_implementation(SAMPLING_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def cache_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The dtype in which attention reads the KV cache, so that the cache is cast once. None: no cast."""
    if model.config._attn_implementation == SAMPLING_ATTENTION:
        return torch.float32
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
