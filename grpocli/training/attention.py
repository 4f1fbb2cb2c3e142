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

from grpocli.training import sdpa

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
        if sdpa.is_cpu(device):
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
    """Of a whole sequence. on_cpu: how `sdpa` is called; `grpocli plan` plans for a GPU on a CPU."""

    parts: tuple[Segment, ...]
    on_cpu: bool


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
    groups = query.shape[1] // key.shape[1]
    how = {"dropout_p": dropout, "scale": scaling}
    if not segments.on_cpu:
        return _attend(query, key, value, segments.parts, partial(sdpa.on_gpu, groups=groups, how=how)), None
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    with torch.autocast("cpu", enabled=False):  # what is computed in what is said there
        return _attend(query, key, value, segments.parts, partial(sdpa.on_cpu, groups=groups, low=low, how=how)), None


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], call: sdpa.Kernel) -> Tensor:
    sizes = [n for segment in segments for n in (segment.prompt, *(block.size for block in segment.blocks))]
    queries, keys, values = (iter(states.split(sizes, 2)) for states in (query, key, value))
    outputs = []
    for segment in segments:
        query_P, key_P, value_P = next(queries), next(keys), next(values)
        outputs.append(call(query_P, key_P, value_P, None))
        for block in segment.blocks:
            seen = torch.cat([key_P, next(keys)], 2), torch.cat([value_P, next(values)], 2)
            if block.mask is None:
                whole = call(torch.cat([query_P, next(queries)], 2), *seen, None)
                outputs.append(whole.split([segment.prompt, block.size], 2)[1])
            else:
                outputs.append(call(next(queries), *seen, block.mask))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def register() -> None:
    """Make NAME an attention implementation of transformers; masks are those of `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def choose(model: PreTrainedModel, longest: int) -> bool:
    """Have the model attend by `attend`, if its attention is of a kind that it knows; whether it does.

    Full causal attention of rows of up to `longest` tokens, through transformers' registry. That the model hands the
    segments through is found out by trying it.
    """
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:  # LoRA: policy and reference are one model
        return True
    if config._attn_implementation != "sdpa" or not knows(model.config, longest):
        return False
    register()
    model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def leave(model: PreTrainedModel) -> None:
    """Undo `choose`."""
    if model.config.get_text_config()._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")


def knows(config: Any, longest: int) -> bool:
    """Whether a model with this config attends to all that came before, in every layer, in rows of up to `longest`."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if window and window < longest:
        return False
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return kinds <= {"full_attention", *(["sliding_attention"] if window else [])}
