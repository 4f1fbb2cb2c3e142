"""Attention over rows that lie end to end, with each prompt once before the completions of its group.

A `Segment` is a prompt with its completions. Prompt tokens attend to the prompt; tokens of a completion attend to the
prompt and to earlier tokens of the same completion. All other operations of a decoder layer are per token, so a
sequence of segments is equivalent to the separate rows, without padding and with each prompt computed once; gradients
reach the prompt from every completion. Within a call of `sdpa`, completions may be padded to one length.

transformers calls `attend` through its registry of attention functions and passes the segments through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from grpocli.hardware.devices import to_device
from grpocli.models import sdpa
from grpocli.models.frozen_linear import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NAME = "shared_prompts"
MIN_TOKENS = 128
"""Completion tokens that justify a call of `sdpa`."""
MAX_PADDING = 0.2
"""Largest share of padding in the rows of a block."""
MAX_MASK_ELEMENTS = 2**24
"""Most elements of a mask. Without a mask, memory is linear in the tokens."""


@dataclass(frozen=True, slots=True)
class Block:
    """Completions of one prompt that share a call of `sdpa`; `size` tokens of the sequence.

    rows, width: shape of the call: one row per completion, each after a copy of the prompt's keys, or one row with all
    completions end to end after a single copy. row_index, token_index: indices that put tokens into padded rows, and
    that take them out again; None: rows have equal lengths.
    mask [width, prompt + width]: the tokens that each token attends to; on a CPU the values to add to scores, which
    `sdpa` would otherwise compute in every layer. None: the prompt's queries precede those of each row, so attention
    is causal, which takes half the work and no memory for a mask.
    """

    size: int
    rows: int
    width: int
    mask: Tensor | None
    row_index: Tensor | None = None
    token_index: Tensor | None = None

    @classmethod
    def build(cls, prompt: int, lengths: Sequence[int], device: torch.device, on_cpu: bool) -> Block:
        size, width = sum(lengths), max(lengths)
        if not _copies_pay_off(prompt, width):
            return cls(size, 1, size, _mask(prompt, lengths, device, on_cpu))
        causal = (width >= prompt and sdpa.prefers_causal(width, on_cpu)) or _mask_is_too_large(prompt, width)
        mask = None if causal else _mask(prompt, [width], device, on_cpu)
        block = cls(size, len(lengths), width, mask)
        if size == len(lengths) * width:
            return block
        present = (np.arange(width) < np.array(lengths)[:, None]).flatten()
        row_index, token_index = (
            to_device(torch.from_numpy(index), device)
            for index in (np.where(present, present.cumsum() - 1, 0), np.flatnonzero(present))
        )
        return replace(block, row_index=row_index, token_index=token_index)

    def to_rows(self, states: Tensor) -> Tensor:
        """Arrange states in rows: [1, heads, size, D] -> [rows, heads, width, D]. No real token attends to padding."""
        if self.row_index is not None:
            states = states.index_select(2, self.row_index)
        return states.view(*states.shape[1:2], self.rows, self.width, states.shape[3]).transpose(0, 1)

    def to_sequence(self, states: Tensor) -> Tensor:
        """The inverse of `to_rows`: [rows, heads, width, D] -> [1, heads, size, D]."""
        line = states.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        return line if self.token_index is None else line.index_select(2, self.token_index)


def _mask(prompt: int, lengths: Sequence[int], device: torch.device, on_cpu: bool) -> Tensor:
    """The mask [N, prompt + N] of N tokens of completions, end to end after their prompt."""
    row_N = np.repeat(np.arange(len(lengths)), lengths)
    own_NN = np.tri(len(row_N), dtype=bool) & (row_N[:, None] == row_N)
    mask = np.concatenate([np.ones((len(row_N), prompt), dtype=bool), own_NN], 1)
    if on_cpu:
        mask = np.where(mask, np.float32(0), np.float32("-inf"))
    return to_device(torch.from_numpy(mask), device)


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt of `prompt` tokens, followed by its completions in blocks. Without blocks, one causal row."""

    prompt: int
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a sequence. on_cpu: call `sdpa` as on a CPU; `grpocli plan` plans for GPUs on a CPU."""

    parts: tuple[Segment, ...]
    on_cpu: bool

    @classmethod
    def build(cls, prompts: Sequence[tuple[int, Sequence[int]]], device: torch.device, on_cpu: bool) -> Segments:
        """The segments of prompts: the tokens of each prompt, and of each of its completions, which follow."""
        parts = []
        for prompt, lengths in prompts:
            if len(lengths) == 1:  # a prompt and its only completion are one causal row
                parts.append(Segment(prompt + lengths[0]))
                continue
            found = split_into_blocks(prompt, lengths)
            blocks = (Block.build(prompt, [lengths[k] for k in block], device, on_cpu) for block in found)
            parts.append(Segment(prompt, tuple(blocks)))
        return cls(tuple(parts), on_cpu)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
        """query [1, heads, N, D], key and value [1, heads / groups, N, D] -> [1, N, heads, D].

        how: `dropout_p` and `scale`, as of `sdpa`.
        """
        groups, dtype = query.shape[1] // key.shape[1], compute_dtype(query)
        if not self.on_cpu:
            # the rotation of positions has left them in float32; copies of prompts would take twice the memory
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            return _attend(query, key, value, self.parts, partial(sdpa.on_gpu, groups=groups, how=how))
        with torch.autocast("cpu", enabled=False):  # `sdpa.on_cpu` chooses the dtype
            return _attend(query, key, value, self.parts, partial(sdpa.on_cpu, groups=groups, low=dtype, how=how))


class Attends(Protocol):
    """What the tokens of a packed sequence attend to: `Segments`, or `TiledMask` of `flex_attention`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
        """The output of attention, as of `Segments.attend`."""
        ...


def split_into_blocks(prompt: int, lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the completions in each block, in order. lengths: tokens of each completion.

    If the longest completion has at least half of the prompt's tokens, a block has completions of similar length, since
    copies of the prompt then cost at most twice the completions. Otherwise a block has completions with at most as many
    tokens as the prompt (or MIN_TOKENS): scores between different completions are computed there and discarded. A
    completion whose mask would be too large is a block with a copy.
    """
    found: list[list[int]] = []
    for number in range(len(lengths)):
        if not found or not _fits_block(prompt, [lengths[k] for k in (*found[-1], number)]):
            found.append([])
        found[-1].append(number)
    return found


def _fits_block(prompt: int, lengths: Sequence[int]) -> bool:
    rows, size = len(lengths) * max(lengths), sum(lengths)
    if _copies_pay_off(prompt, max(lengths)):
        return rows - size <= MAX_PADDING * rows
    return size <= max(prompt, MIN_TOKENS) and not _mask_is_too_large(prompt, size)


def _copies_pay_off(prompt: int, longest: int) -> bool:
    """Whether each completion gets a copy of the prompt's keys and values."""
    return 2 * longest >= prompt or _mask_is_too_large(prompt, longest)


def _mask_is_too_large(prompt: int, tokens: int) -> bool:
    return tokens * (prompt + tokens) > MAX_MASK_ELEMENTS


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Attends | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; without segments, the `sdpa` of transformers for rows side by side.

    query [1, heads, N, D], key and value [1, heads / groups, N, D] -> [1, N, heads, D].
    """
    if segments is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    refused = [name for name in ("s_aux", "softcap", "position_bias") if others.get(name) is not None]
    if refused or (attention_mask is not None and attention_mask.shape != (1, 1, 1, 1)):
        raise ValueError(f"attention over segments does not support {', '.join(refused) or 'a mask of the model'}")
    return segments.attend(query, key, value, {"dropout_p": dropout, "scale": scaling}), None


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], call: sdpa.Kernel) -> Tensor:
    sizes = [n for segment in segments for n in (segment.prompt, *(block.size for block in segment.blocks))]
    queries, keys, values = (iter(states.split(sizes, 2)) for states in (query, key, value))
    outputs = []
    for segment in segments:
        query_P, key_P, value_P = next(queries), next(keys), next(values)
        outputs.append(call(query_P, key_P, value_P, None))
        for block in segment.blocks:
            outputs.append(
                _attend_block(block, (query_P, key_P, value_P), (next(queries), next(keys), next(values)), call)
            )
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _attend_block(
    block: Block, prompt: tuple[Tensor, Tensor, Tensor], own: tuple[Tensor, Tensor, Tensor], call: sdpa.Kernel
) -> Tensor:
    """The output of a block. prompt, own: query, key and value [1, heads, N, D]."""
    query, key, value = (block.to_rows(states) for states in own)
    query_P, key_P, value_P = prompt
    if block.mask is None:
        query = _after_prompt(query_P, query)
    seen = call(query, _after_prompt(key_P, key), _after_prompt(value_P, value), block.mask)
    return block.to_sequence(seen[:, :, -block.width :])


def _after_prompt(prompt: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([prompt.expand(len(rows), -1, -1, -1), rows], 2)


def register(in_graphs: bool = True) -> None:
    """Register NAME as an attention implementation of transformers, with the masks of `sdpa`.

    in_graphs: whether a compiled decoder layer has it in its graph.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend if in_graphs else torch.compiler.disable(attend))
    AttentionMaskInterface.register(NAME, sdpa_mask)


def enable(model: PreTrainedModel, longest: int) -> bool:
    """Make the model use `attend`, if `supports` its config; returns whether it does. longest: tokens of a row.

    Whether the model passes segments to `attend` is only known after a forward pass (`training/packing_check.py`).
    """
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:  # LoRA: policy and reference are one model
        return True
    if config._attn_implementation != "sdpa" or not supports(model.config, longest):
        return False
    register()
    model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def disable(model: PreTrainedModel) -> None:
    """Undo `enable`."""
    if model.config.get_text_config()._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")


@contextmanager
def masks_without_waiting(full: bool) -> Iterator[None]:
    """A block in which transformers makes the masks of rows side by side without reading numbers from the device.

    Otherwise it reads in each forward whether padding hides a token. full: whether there is none. The masks are the
    same. No other thread may call a model meanwhile.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

    def mask(make: Callable[..., Tensor | None], **given: Any) -> Tensor | None:
        known = {"attention_mask": None} if full else {"allow_is_causal_skip": False}
        return make(**{**given, **known})

    plain = {name: masks[name] for name in ("sdpa", NAME) if name in masks}
    masks.update({name: partial(mask, make) for name, make in plain.items()})
    try:
        yield
    finally:
        for name in plain:
            del masks[name]


def supports(config: Any, longest: int) -> bool:
    """Whether every layer has full causal attention over rows of up to `longest` tokens."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if window and window < longest:
        return False
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return kinds <= {"full_attention", *(["sliding_attention"] if window else [])}
