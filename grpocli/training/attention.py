"""Attention over rows that lie end to end, with the prompt of a group once before its completions.

A `Segment` is a prompt and completions of it. Prompt tokens attend to the prompt; a completion's attend to the prompt
and to those before them in the completion. All else in a decoder layer looks at one token alone, so a sequence of
segments is what the rows are, without padding and with each prompt computed once; gradients flow into it from every
completion.

transformers calls this through its registry of attention functions, and hands the segments through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NAME = "shared_prompts"
ENOUGH = 512
"""Completion tokens in a call of `sdpa` that are worth one."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens [start, end) of the sequence: completions, one after the other. mask [n, P + n]: what each attends to."""

    start: int
    end: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt, tokens [start, end) of the sequence, and behind it its completions, block by block.

    A block is one call of `sdpa`. It computes scores between its completions that its mask throws away, and keeps the
    prompt's keys and values once; `blocks` bounds both.
    """

    start: int
    end: int
    blocks: tuple[Block, ...]


def blocks(start: int, prompt: int, lengths: Sequence[int], device: torch.device) -> Iterator[Block]:
    """Of completions from token `start` on: as many together as have no more tokens than their prompt, or ENOUGH."""
    together: list[int] = []
    for length in [*lengths, 0]:
        if together and (not length or sum(together) + length > max(prompt, ENOUGH)):
            size = sum(together)
            own = torch.block_diag(*(torch.ones(n, n).tril() for n in together)).bool()
            mask = torch.cat([torch.ones(size, prompt, dtype=torch.bool), own], 1)
            yield Block(start, start + size, mask.to(device, non_blocking=True))
            start, together = start + size, []
        together.append(length)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Sequence[Segment] | None = None,
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
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for segment in segments:
        prompt = slice(segment.start, segment.end)
        key_P, value_P = key[:, :, prompt], value[:, :, prompt]
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, prompt],
                _each(key_P, groups),
                _each(value_P, groups),
                is_causal=True,
                dropout_p=dropout,
                scale=scaling,
            )
        )
        for block in segment.blocks:
            here = slice(block.start, block.end)
            outputs.append(
                scaled_dot_product_attention(
                    query[:, :, here],
                    _each(torch.cat([key_P, key[:, :, here]], 2), groups),
                    _each(torch.cat([value_P, value[:, :, here]], 2), groups),
                    attn_mask=block.mask,
                    dropout_p=dropout,
                    scale=scaling,
                )
            )
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


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


def knows(config: Any) -> bool:
    """Whether a model with this config attends to all that came before, in every layer."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return kinds == {"full_attention"} and not sliding
