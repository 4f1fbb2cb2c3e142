"""Attention over rows that lie end to end, with the prompt of a group once before its completions.

A `Segment` is a prompt and completions of it. Prompt tokens attend to the prompt; a completion's attend to the prompt
and to those before them in the completion. All else in a decoder layer looks at one token alone, so a sequence of
segments is what the rows are, without padding and with each prompt computed once; gradients flow into it from every
completion. For the length of a call of `sdpa` completions may be filled up to rows of one length.

transformers calls this through its registry of attention functions, and hands the segments through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from grpocli.models import sdpa

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NAME = "shared_prompts"
ENOUGH = 128
"""Completion tokens in a call of `sdpa` that are worth one."""
FILLED = 0.2
"""The most of the rows of a block that is there to make them equally long."""


@dataclass(frozen=True, slots=True)
class Block:
    """Completions of a prompt that are one call of `sdpa`, `size` tokens of the sequence.

    rows, width: how they lie in it: each in a row of its own behind a copy of the prompt's keys, or all in one row, end
    to end, behind a single copy. in_rows, in_line: which of the block's tokens is where in rows that are filled up to
    the longest, and where each token is in them; None: rows are equally long.
    mask [width, prompt + width]: what a row's tokens attend to; on a CPU what is added to their scores, since `sdpa`
    would make that of it in every layer. None: the prompt's queries go before each row's own, so that attention is
    plainly causal: half the work, and no memory for a mask.
    """

    size: int
    rows: int
    width: int
    mask: Tensor | None
    in_rows: Tensor | None = None
    in_line: Tensor | None = None

    @classmethod
    def of(cls, prompt: int, lengths: Sequence[int], device: torch.device, on_cpu: bool) -> Block:
        size, width = sum(lengths), max(lengths)
        if not _are_worth_copies(prompt, width):
            return cls(size, 1, size, _mask(prompt, lengths, device, on_cpu))
        causal = width >= prompt and sdpa.prefers_causal(width, on_cpu)
        mask = None if causal else _mask(prompt, [width], device, on_cpu)
        block = cls(size, len(lengths), width, mask)
        if size == len(lengths) * width:
            return block
        present = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        in_rows = torch.where(present, present.flatten().cumsum(0).view_as(present) - 1, 0).flatten()
        in_line = present.flatten().nonzero().squeeze(1)
        return replace(block, in_rows=in_rows.to(device), in_line=in_line.to(device))

    def side_by_side(self, states: Tensor) -> Tensor:
        """[1, heads, size, D] -> [rows, heads, width, D]. Nothing real attends to what fills a row up."""
        if self.in_rows is not None:
            states = states.index_select(2, self.in_rows)
        return states.view(*states.shape[1:2], self.rows, self.width, states.shape[3]).transpose(0, 1)

    def end_to_end(self, states: Tensor) -> Tensor:
        """[rows, heads, width, D] -> [1, heads, size, D]."""
        line = states.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        return line if self.in_line is None else line.index_select(2, self.in_line)


def _mask(prompt: int, lengths: Sequence[int], device: torch.device, on_cpu: bool) -> Tensor:
    """Of completions end to end behind their prompt."""
    own = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool).tril() for n in lengths))
    mask = torch.cat([torch.ones(len(own), prompt, dtype=torch.bool), own], 1)
    if on_cpu:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    return mask.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt, so many tokens of the sequence, and behind it its completions, block by block."""

    prompt: int
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Segments:
    """Of a whole sequence. on_cpu: how `sdpa` is called, wherever the tensors are: `grpocli plan` plans for GPUs."""

    parts: tuple[Segment, ...]
    on_cpu: bool


def blocks_of(prompt: int, lengths: Sequence[int]) -> list[list[int]]:
    """Which completions make a block, in order.

    Where the longest has at least half of the prompt's tokens, those of about one length: copies of the prompt are at
    most twice what they are copied for. Else as many as have no more tokens than their prompt, or what is worth a
    call: scores between completions are computed there and thrown away.
    """
    found: list[list[int]] = []
    for number in range(len(lengths)):
        if not found or not _makes_one(prompt, [lengths[k] for k in (*found[-1], number)]):
            found.append([])
        found[-1].append(number)
    return found


def _makes_one(prompt: int, lengths: Sequence[int]) -> bool:
    rows, size = len(lengths) * max(lengths), sum(lengths)
    if _are_worth_copies(prompt, max(lengths)):
        return rows - size <= FILLED * rows
    return size <= max(prompt, ENOUGH)


def _are_worth_copies(prompt: int, longest: int) -> bool:
    """Of the prompt, for each of its completions."""
    return 2 * longest >= prompt


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
            outputs.append(_of_block(block, (query_P, key_P, value_P), (next(queries), next(keys), next(values)), call))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _of_block(
    block: Block, of_prompt: tuple[Tensor, Tensor, Tensor], own: tuple[Tensor, Tensor, Tensor], call: sdpa.Kernel
) -> Tensor:
    """of_prompt, own: query, key and value [1, heads, N, D]."""
    query, key, value = (block.side_by_side(states) for states in own)
    query_P, key_P, value_P = of_prompt
    if block.mask is None:
        query = _behind(query_P, query)
    seen = call(query, _behind(key_P, key), _behind(value_P, value), block.mask)
    return block.end_to_end(seen[:, :, -block.width :])


def _behind(prompt: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([prompt.expand(len(rows), -1, -1, -1), rows], 2)


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
