"""Attention over rows that lie end to end, with the prompt of a group once before its completions.

A `Segment` is a prompt and completions of it. Prompt tokens attend to the prompt; a completion's attend to the prompt
and to those before them in the completion. All else in a decoder layer looks at one token alone, so a sequence of
segments is what the rows are, without padding and with each prompt computed once; gradients flow into it from every
completion.

transformers calls this through its registry of attention functions, and hands the segments through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NAME = "shared_prompts"
ENOUGH = 128
"""Completion tokens in a call of `sdpa` that are worth one."""


@dataclass(frozen=True, slots=True)
class Block:
    """Completions one after the other, `size` tokens.

    mask [size, prompt + size]: what each of them attends to; on a CPU what is added to its scores, since `sdpa` would
    make that of it in every layer. None: one completion that is as long as its prompt, or longer. The prompt's queries
    go before its own then, so that attention is plainly causal: half the work, and no memory for a mask.
    """

    size: int
    mask: Tensor | None

    @classmethod
    def of(cls, prompt: int, lengths: Sequence[int], device: torch.device) -> Block:
        size = sum(lengths)
        if len(lengths) == 1 and size >= prompt:
            return cls(size, None)
        own = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool).tril() for n in lengths))
        mask = torch.cat([torch.ones(size, prompt, dtype=torch.bool), own], 1)
        if in_float32(device):
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        return cls(size, mask.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt, so many tokens of the sequence, and behind it its completions, block by block.

    A block is one call of `sdpa`. It computes scores between its completions that its mask throws away, and keeps the
    prompt's keys and values once; `blocks_of` bounds both.
    """

    prompt: int
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Segments:
    """Of a whole sequence. float32: what attention computes in."""

    parts: tuple[Segment, ...]
    float32: bool


def in_float32(device: torch.device) -> bool:
    """On a CPU: there each new length in bfloat16 compiles kernels of 5 MB that are never freed, and is no faster."""
    return device.type == "cpu"


def blocks_of(prompt: int, lengths: Sequence[int]) -> list[list[int]]:
    """Which completions make a block: as many as have no more tokens than their prompt, or what is worth a call."""
    most, size = max(prompt, ENOUGH), 0
    found: list[list[int]] = []
    for number, length in enumerate(lengths):
        if not found or size + length > most:
            found.append([])
            size = 0
        found[-1].append(number)
        size += length
    return found


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, N, D], key and value [1, heads / groups, N, D] -> [1, N, heads, D]. As transformers calls it.

    Without segments: rows side by side, as `sdpa` does it.
    """
    if segments is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    refused = [name for name in ("s_aux", "softcap", "position_bias") if others.get(name) is not None]
    if refused or (attention_mask is not None and attention_mask.shape != (1, 1, 1, 1)):
        raise ValueError(f"attention has more to it than segments: {', '.join(refused) or 'a mask of the model'}")
    if not segments.float32:
        return _attend(query, key, value, segments.parts, dropout, scaling), None
    with torch.autocast(query.device.type, enabled=False):
        out = _attend(query.float(), key.float(), value.float(), segments.parts, dropout, scaling)
    return out.to(query.dtype), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], dropout: float, scaling: float | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    grouped = groups > 1 and in_float32(query.device)  # elsewhere, with a mask, `sdpa` would fall back to its slowest
    attention = partial(scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    each = partial(_each, groups=1 if grouped else groups)
    sizes = [n for segment in segments for n in (segment.prompt, *(block.size for block in segment.blocks))]
    queries, keys, values = (iter(states.split(sizes, 2)) for states in (query, key, value))
    outputs = []
    for segment in segments:
        key_P, value_P = next(keys), next(values)
        query_P = next(queries)
        outputs.append(attention(query_P, each(key_P), each(value_P), is_causal=True))
        for block in segment.blocks:
            seen = each(torch.cat([key_P, next(keys)], 2)), each(torch.cat([value_P, next(values)], 2))
            if block.mask is None:
                whole = attention(torch.cat([query_P, next(queries)], 2), *seen, is_causal=True)
                outputs.append(whole.split([segment.prompt, block.size], 2)[1])
            else:
                mask = block.mask
                if mask.is_floating_point():  # FSDP2 casts whatever a model is called with; 0 and -inf survive it
                    mask = mask.to(query.dtype)
                outputs.append(attention(next(queries), *seen, attn_mask=mask))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _each(states: Tensor, groups: int) -> Tensor:
    """A key or value head for each head of the query."""
    return states if groups == 1 else states.repeat_interleave(groups, 1)


def register() -> None:
    """Make NAME an attention implementation of transformers; masks are those of `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def choose(model: PreTrainedModel) -> bool:
    """Have the model attend by `attend`, if its attention is of a kind that it knows; whether it does.

    Full causal attention through transformers' registry. That the model hands the segments through is found out by
    trying it.
    """
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:  # LoRA: policy and reference are one model
        return True
    if config._attn_implementation != "sdpa" or not knows(model.config):
        return False
    register()
    model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def leave(model: PreTrainedModel) -> None:
    """Undo `choose`."""
    if model.config.get_text_config()._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")


def knows(config: Any) -> bool:
    """Whether a model with this config attends to all that came before, in every layer."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return kinds == {"full_attention"} and not sliding
