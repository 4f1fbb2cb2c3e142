"""Attention over rows that lie end to end, with each prompt once before the completions of its group.

Tokens attend to their prompt and to earlier tokens of their completion. All other operations of a decoder layer are per
token, so such a sequence is equivalent to the separate rows; gradients reach the prompt from every completion.

`Segments` takes a few calls of `sdpa`, each for many rows of similar length, whose tokens are gathered from the
sequence. transformers calls `attend` through its registry of attention functions, with the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from grpocli.hardware import to_device
from grpocli.models.frozen_linear import compute_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    Array = NDArray[Any]

NAME = "shared_prompts"
MIN_TOKENS = 128
"""Completion tokens that justify a row."""
KEYS_AT_ONCE = 2**12
"""Keys of a call of several rows, whose copies take memory."""
MAX_MASK_ELEMENTS = 2**24
"""Most elements of a row's mask. Without a mask, memory is linear in the tokens."""
SMALL_MASK, MASKS_AT_ONCE = 2**14, 2**20
"""Elements up to which rows of different prompts share a call, with a mask for each, and of all masks of a call."""

MANY_QUERIES, MANY_KEYS = 256, 512
"""On a CPU, calls of at least this size are faster in bfloat16, and smaller ones in float32."""
STEP = 64
"""Lengths of calls in bfloat16 on a CPU are multiples of this."""

MAX_FLASH_HEAD_DIM, AMPERE = 256, (8, 0)
"""Largest head dimension of the flash kernel, and the first GPUs that have it."""
MASKED = 512
"""On a CPU, up to this many queries, a mask is faster than causal attention with the prompt's queries repeated."""

Kernel = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""query [R, heads, N, D], key and value [R, heads / groups, M, D], mask of `Call` -> [R, heads, N, D]."""


class RowOfTokens(NamedTuple):
    """A row of a call: `n` tokens of the sequence, from `start` on, after the `n_prompt` ones from `prompt` on.

    causal: the prompt's tokens are queries too, so that no mask is needed. Otherwise the `n` tokens are the queries, of
    one completion or of several (`several`), each of which attends to the prompt and to itself.
    """

    prompt: int
    n_prompt: int
    start: int
    n: int
    causal: bool
    several: bool = False

    @property
    def keys(self) -> int:
        return self.n_prompt + self.n

    @property
    def queries(self) -> int:
        return self.keys if self.causal else self.n


@dataclass(slots=True)
class Call:
    """A call of `sdpa` for R rows of Q queries and K keys."""

    rows: int
    queries: int
    keys: int
    mask: Tensor | None
    """[R or 1, 1, Q, K up to a multiple of 8]: values to add to scores. None: attention is causal."""

    @classmethod
    def build(cls, rows: Sequence[RowOfTokens], own_N: Array, device: torch.device) -> tuple[Call, Array, Array]:
        """The call, its queries [R, Q] and keys [R, K]: tokens of the sequence, and behind them -1 for padding.

        own_N: as of `_mask`.
        """
        prompt_R1, n_prompt_R1, start_R1, n_R1 = (np.array(one)[:, None] for one in list(zip(*rows, strict=True))[:4])
        place_K = np.arange(max(row.keys for row in rows))
        key_RK = np.where(place_K < n_prompt_R1, prompt_R1 + place_K, start_R1 - n_prompt_R1 + place_K)
        key_RK = np.where(place_K < n_prompt_R1 + n_R1, key_RK, -1)
        if rows[0].causal:
            return cls(len(rows), len(place_K), len(place_K), None), key_RK, key_RK
        place_Q = np.arange(n_R1.max())
        query_RQ = np.where(place_Q < n_R1, start_R1 + place_Q, -1)
        some = [int(n_R1.argmax())] if _is_uniform(rows) else slice(None)
        mask = to_device(_mask(query_RQ[some], key_RK[some], start_R1[some], own_N), device)
        return cls(len(rows), len(place_Q), len(place_K), mask), query_RQ, key_RK


def _mask(query_RQ: Array, key_RK: Array, start_R1: Array, own_N: Array) -> Tensor:
    """The mask of a `Call`. query_RQ, key_RK: tokens, -1 at padding. start_R1: the first token behind a row's prompt.

    own_N: the first token of each token's prompt or completion.
    """
    query_RQ1, key_R1K = query_RQ[:, :, None], key_RK[:, None]
    in_prompt_R1K = (key_R1K >= 0) & (key_R1K < start_R1[:, None])
    attends = in_prompt_R1K | ((key_R1K >= own_N[query_RQ1]) & (key_R1K <= query_RQ1))
    attends[query_RQ < 0, 0] = True  # otherwise the softmax of padding would be NaN
    values = np.full((*attends.shape[:2], -(-attends.shape[2] // 8) * 8), -np.inf, np.float32)
    values[..., : attends.shape[2]][attends] = 0
    return torch.from_numpy(values[:, None])


def _is_uniform(rows: Sequence[RowOfTokens]) -> bool:
    """Whether the mask of the longest row is right for all: padding comes after all tokens that attend."""
    return not any(row.several for row in rows) and len({row.n_prompt for row in rows}) == 1


@dataclass(frozen=True, slots=True)
class Segments:
    """The calls of `sdpa` for a sequence."""

    calls: list[Call]
    query_index: Tensor
    """The tokens that are queries of all calls, row by row; `key_index` those that are keys."""
    key_index: Tensor
    output_index: Tensor
    """For each token of the sequence, which of these queries it is."""
    on_cpu: bool
    """Call `sdpa` as on a CPU; `grpocli plan` plans for GPUs on a CPU."""

    @classmethod
    def build(cls, prompts: Sequence[tuple[int, Sequence[int]]], device: torch.device, on_cpu: bool) -> Segments:
        """The segments of prompts: the tokens of each prompt, and of each of its completions, which follow."""
        lengths = [n for prompt, completions in prompts for n in (prompt, *completions)]
        own_N = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        made = [Call.build(rows, own_N, device) for rows in calls_of(list(rows_of(prompts, on_cpu)))]
        calls, queries, keys = zip(*made, strict=True)
        query_index, key_index = (np.concatenate([one.flatten() for one in tokens]) for tokens in (queries, keys))
        output_N = np.zeros(len(own_N), np.int64)
        output_N[query_index[query_index >= 0]] = np.flatnonzero(query_index >= 0)
        found = (torch.from_numpy(index.clip(min=0)) for index in (query_index, key_index, output_N))
        query, key, output = (to_device(index, device) for index in found)
        return cls(list(calls), query, key, output, on_cpu)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
        """query [1, heads, N, D], key and value [1, heads / groups, N, D] -> [1, N, heads, D].

        how: `dropout_p` and `scale`, as of `sdpa`.
        """
        groups, dtype = query.shape[1] // key.shape[1], compute_dtype(query)
        # on a GPU, the rotation of positions has left them in float32; on a CPU, gradients of copies add up in float32
        given, dtype_of_copies = query.dtype, torch.float32 if self.on_cpu else dtype
        with torch.autocast(query.device.type, enabled=False):
            query, key, value = (states.to(dtype_of_copies) for states in (query, key, value))
            if self.on_cpu:
                seen = _attend(query, key, value, self, partial(cpu_sdpa, groups=groups, low=dtype, how=how))
                return seen.to(given)
            return _attend(query, key, value, self, partial(gpu_sdpa, groups=groups, how=how))


def rows_of(prompts: Sequence[tuple[int, Sequence[int]]], on_cpu: bool) -> Iterator[RowOfTokens]:
    """Yield the rows whose queries are all tokens of the prompts and of their completions, see `Segments.build`.

    A completion with at least half of the prompt's tokens has its own row, after a copy of the prompt. A row of shorter
    ones has at most as many of their tokens as the prompt, or MIN_TOKENS: scores between completions are computed and
    discarded. Where a mask would be slower or too large, the prompt's tokens are queries again.
    """
    first = 0
    for prompt, lengths in prompts:
        start = first + prompt
        found: list[RowOfTokens] = []
        for n in lengths:
            mask_is_slower = len(lengths) == 1 or (n >= prompt and not (on_cpu and n <= MASKED))
            causal = mask_is_slower or n * (prompt + n) > MAX_MASK_ELEMENTS
            row = RowOfTokens(first, prompt, start, n, causal)
            if found and (joined := _joined(found[-1], row)):
                found[-1] = joined
            else:
                found.append(row)
            start += n
        if not any(row.causal for row in found):
            yield RowOfTokens(first, 0, first, prompt, causal=True)
        yield from found
        first = start


def _joined(row: RowOfTokens, other: RowOfTokens) -> RowOfTokens | None:
    """Both rows in one, if their completions are short."""
    size = row.n + other.n
    if any(one.causal or (2 * one.n >= one.n_prompt and not one.several) for one in (row, other)):
        return None
    if size > max(row.n_prompt, MIN_TOKENS) or size * (row.n_prompt + size) > MAX_MASK_ELEMENTS:
        return None
    return row._replace(n=size, several=True)


def calls_of(rows: Sequence[RowOfTokens]) -> Iterator[list[RowOfTokens]]:
    """The rows of each call: of one kind and of similar size."""

    def kind(row: RowOfTokens) -> tuple[int, ...]:
        # multiples of 16 that are at most a quarter apart
        sizes = row.causal, *(rounded(-(-n // 16), bits=3) for n in (row.queries, row.keys))
        if row.causal or row.queries * row.keys <= SMALL_MASK:
            return sizes
        return *sizes, row.several, row.n_prompt  # rows that can share a mask

    for _, similar in groupby(sorted(rows, key=kind), kind):
        some = list(similar)
        queries, keys = max(row.queries for row in some), max(row.keys for row in some)
        at_once = KEYS_AT_ONCE // keys
        if not (some[0].causal or _is_uniform(some)):
            at_once = min(at_once, MASKS_AT_ONCE // (queries * keys))
        at_once = max(1, at_once)
        yield from (some[i : i + at_once] for i in range(0, len(some), at_once))


def rounded(n: int, bits: int = 5) -> int:
    """The next number of at most `bits` significant bits, so that micro-batches have few sizes.

    On a CPU each new size of a bfloat16 product compiles a kernel that is never freed. On a GPU few sizes reuse memory.
    5 bits cost 3 % more tokens on average.
    """
    step = 1 << max(0, n.bit_length() - bits)
    return -(-n // step) * step


class Attends(Protocol):
    """What the tokens of a packed sequence attend to: `Segments`, or `TiledMask` of `flex_attention`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor: ...


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
    changed = any(others.get(name) is not None for name in ("s_aux", "softcap", "position_bias"))
    if changed or (attention_mask is not None and attention_mask.shape != (1, 1, 1, 1)):
        raise ValueError("attention over segments has no sinks, caps, biases or masks of a model")
    return segments.attend(query, key, value, {"dropout_p": dropout, "scale": scaling}), None


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, call: Kernel) -> Tensor:
    """The output [1, N, heads, D] of states in the dtype in which copies are made."""
    calls, heads, size = segments.calls, query.shape[1], value.shape[3]

    def rows(states: Tensor, index: Tensor, lengths: list[int]) -> Iterator[Tensor]:
        """The states [R, heads, tokens, D] of each call. lengths: tokens of a row in each call."""
        copied = _gathered(states[0].transpose(0, 1).flatten(1), index)
        parts = copied.split([one.rows * n for one, n in zip(calls, lengths, strict=True)])
        return (
            part.view(one.rows, -1, *states.shape[1::2]).transpose(1, 2) for part, one in zip(parts, calls, strict=True)
        )

    queries = rows(query, segments.query_index, [one.queries for one in calls])
    keys, values = (rows(states, segments.key_index, [one.keys for one in calls]) for states in (key, value))
    outputs = []
    for one, query_RQ, key_RK, value_RK in zip(calls, queries, keys, values, strict=True):
        if one.mask is not None:
            one.mask = one.mask.to(query.dtype)  # once for all layers
        mask = None if one.mask is None else one.mask[..., : one.keys]
        outputs.append(call(query_RQ, key_RK, value_RK, mask).transpose(1, 2).reshape(-1, heads * size))
    return _gathered(torch.cat(outputs), segments.output_index).view(1, -1, heads, size)


def _gathered(states_NE: Tensor, index: Tensor) -> Tensor:
    """The states of some tokens. Gradients of a token's copies are summed in a fixed order on every device."""
    if states_NE.device.type == "cpu":
        return states_NE.index_select(0, index)
    return torch.nn.functional.embedding(index, states_NE)


def gpu_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, groups: int, how: dict[str, Any]
) -> Tensor:
    """`sdpa` on a GPU. Grouped keys are repeated where its slowest kernel would serve them: only flash has groups."""
    flash = mask is None and query.dtype != torch.float32 and query.shape[3] <= MAX_FLASH_HEAD_DIM
    flash = flash and not (query.is_cuda and torch.cuda.get_device_capability(query.device) < AMPERE)
    if groups > 1 and not flash:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    how = how | {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": groups > 1 and flash}
    out: Tensor = scaled_dot_product_attention(query, key, value, **how)
    return out


def cpu_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    groups: int,
    low: torch.dtype,
    how: dict[str, Any],
) -> Tensor:
    """`sdpa` on a CPU, in float32; large calls in `low` if that is bfloat16.

    There each new length compiles kernels of 5 MB that are never freed, so lengths are padded to multiples of STEP.
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
    """States [..., N, D] with `more` zeros behind them: [..., N + more, D]."""
    return torch.nn.functional.pad(states, (0, 0, 0, more)) if more else states


def register(in_graphs: bool = True) -> None:
    """Register NAME with transformers, with the masks of `sdpa`. in_graphs: of compiled decoder layers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend if in_graphs else torch.compiler.disable(attend))
    AttentionMaskInterface.register(NAME, sdpa_mask)


def enable(model: PreTrainedModel, longest: int) -> bool:
    """Make the model use `attend`, if `supports` its config; returns whether it does. longest: tokens of a row.

    Whether the model passes segments on is known after a forward pass (`training/trials.py`).
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
    """A block in which transformers makes the masks of rows side by side without reading whether padding hides a token.

    Such a read waits for the device. full: whether there is no padding. No other thread may call a model meanwhile.
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
