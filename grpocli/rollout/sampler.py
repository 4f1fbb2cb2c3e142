"""Sampling with a transformers model in this process: each prompt is computed once, and finished rows are dropped.

Keys and values are in preallocated buffers; those of a row may be kept for the next turn of its episode.

On a CPU, decoding attention is computed in float32 even under autocast (`float32_attention`): with one query per row,
bfloat16 `sdpa` takes three to six times as long, and transformers copies grouped keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer

from grpocli.progress import UNWATCHED, Watch
from grpocli.rollout.sampling import StopStrings, draw, first_occurrence, sampling_logits
from grpocli.types import Completion, Request, ReusableKV, Sampling

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLING_ATTENTION = "sampled_in_float32"


@dataclass(slots=True)
class _Rows:
    """The rows that are still sampled."""

    cache: Any
    row: Tensor
    """The output row of each of the batch's rows."""
    attention_BL: Tensor | None
    position_B: Tensor
    logits_BV: Tensor
    seen_BV: Tensor | None
    """The tokens of each row so far, prompt included; None without a repetition penalty."""

    def keep(self, index: Tensor) -> None:
        self.cache.reorder_cache(index)  # unlike `batch_select_indices`, recurrent layers have it
        self.row, self.position_B, self.logits_BV = (x[index] for x in (self.row, self.position_B, self.logits_BV))
        if self.attention_BL is not None:
            self.attention_BL = self.attention_BL[index]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[index]


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    stop_token_ids: Sequence[int],
    version: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    watch: Watch = UNWATCHED,
) -> list[list[Completion]]:
    """Sample `n` completions for each request. A row's tokens depend only on its own request's seed.

    The token that ends a completion is part of it. Cached keys and values of earlier turns are reused if every request
    has them. tokenizer: for stop strings. watch: once it is cancelled, completions end with the current token.
    """
    limits = [r.under(sampling).max_tokens for r in requests for _ in range(r.n)]
    watch.progress(0, len(limits), "completions", "reading the prompts")
    rows = _prefill(model, requests, sampling, version)
    watch.progress(0, len(limits), "completions", "prompts read")
    stop_strings = _stop_strings(requests, sampling, tokenizer)
    limit_B = torch.tensor(limits, device=rows.row.device)
    uniform_BT = _uniforms(requests, sampling.max_tokens).to(rows.row.device)
    stops = torch.tensor(list(stop_token_ids), device=rows.row.device)
    going = torch.ones_like(rows.row, dtype=torch.bool)
    reusable_kv = [reusable for r in requests for reusable in r.reusable_kv or (None,) * r.n]
    drawn = []

    for t in range(max(limits)):
        token, logp = _choose(rows, sampling, uniform_BT[rows.row, t])
        ended = torch.isin(token, stops)
        if stop_strings:
            pairs = zip(rows.row.tolist(), token.tolist(), strict=True)
            ended |= torch.tensor([stop_strings[i].completed_by(one) for i, one in pairs], device=token.device)
        drawn.append((rows.row, torch.full_like(rows.row, t), token, logp, ended))
        before, going = going, going & ~ended & (t + 1 < limit_B[rows.row])
        if any(reusable_kv):
            _store_kv(rows, before & ~going, reusable_kv, version)
        left = int(going.sum())
        done = len(limits) - left * (1 - (t + 1) / max(limits))  # each counts by its share of the longest
        watch.progress(done, len(limits), "completions", f"token {t + 1} of at most {max(limits)}")
        if left == 0 or watch.cancelled():
            break
        if left <= 0.75 * len(going):  # a smaller batch is worth the copy of the cache
            rows.keep(going.nonzero().squeeze(1))
            token, going = token[going], going[going]
        _advance(model, rows, token)
    return _gather(requests, drawn, limits, version)


def _prefill(model: PreTrainedModel, requests: Sequence[Request], sampling: Sampling, version: int) -> _Rows:
    """Run each prompt once, or what follows its earlier turns, and repeat its cache for its completions."""
    from transformers import DynamicCache

    device, cache = model.device, DynamicCache(config=model.config)
    ids_PL, mask_PL = whole = _left_padded([r.token_ids for r in requests], device)
    if all(can_reuse(r, version) for r in requests):
        cached = [r.reusable_kv[0].state.tokens for r in requests]
        ids_PL, new_PL = _left_padded([r.token_ids[n:] for r, n in zip(requests, cached, strict=True)], device)
        mask_PL = torch.cat([fill_cache(requests, cache, ids_PL.shape[1] + sampling.max_tokens), new_PL], 1)
    out = model(
        input_ids=ids_PL,
        attention_mask=mask_PL,
        position_ids=(mask_PL.cumsum(1) - 1).clamp(min=0)[:, -ids_PL.shape[1] :],
        **{cache_argument(type(model).forward): cache},
        use_cache=True,
        logits_to_keep=1,
    )
    seen_PV = None
    if sampling.repetition_penalty != 1:
        seen_PV = first_occurrence(*whole, 0, out.logits.shape[-1]) < 0
    repeats = torch.tensor([r.n for r in requests], device=device)
    rows = _Rows(
        cache=cache,
        row=torch.arange(len(requests), device=device),
        attention_BL=None if mask_PL.all() else mask_PL,
        position_B=mask_PL.sum(1),
        logits_BV=out.logits[:, -1],
        seen_BV=seen_PV,
    )
    if any(r.n > 1 for r in requests):
        rows.keep(rows.row.repeat_interleave(repeats))
    preallocate(rows.cache, sampling.max_tokens, cache_dtype(model))
    rows.row = torch.arange(len(rows.row), device=device)
    return rows


def _left_padded(token_ids: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [P, L], padded on the left."""
    longest = max(map(len, token_ids))
    ids_PL = torch.zeros(len(token_ids), longest, dtype=torch.long)
    mask_PL = torch.zeros_like(ids_PL)
    for i, own in enumerate(token_ids):
        ids_PL[i, longest - len(own) :] = torch.tensor(own)
        mask_PL[i, longest - len(own) :] = 1
    return ids_PL.to(device), mask_PL.to(device)


def _store_kv(rows: _Rows, ended: Tensor, reusable_kv: Sequence[ReusableKV | None], version: int) -> None:
    """Store keys and values of rows that have ended, for a next turn; the last token has none yet."""
    for i in ended.nonzero().squeeze(1).tolist():
        reusable = reusable_kv[int(rows.row[i])]
        if reusable is not None:
            reusable.state = cached_row(rows.cache, rows.attention_BL, i, version)


def _advance(model: PreTrainedModel, rows: _Rows, token_B: Tensor) -> None:
    if rows.seen_BV is not None:
        rows.seen_BV.scatter_(1, token_B.unsqueeze(1), True)
    if rows.attention_BL is not None:
        rows.attention_BL = torch.cat([rows.attention_BL, rows.attention_BL.new_ones(len(token_B), 1)], 1)
    out = model(
        input_ids=token_B.unsqueeze(1),
        attention_mask=rows.attention_BL,
        position_ids=rows.position_B.unsqueeze(1),
        **{cache_argument(type(model).forward): rows.cache},
        use_cache=True,
        logits_to_keep=1,
    )
    rows.position_B = rows.position_B + 1
    rows.logits_BV = out.logits[:, -1]


def _choose(rows: _Rows, sampling: Sampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-prob under the distribution sampled from."""
    logits_BV = sampling_logits(rows.logits_BV, sampling, seen_NV=rows.seen_BV)
    if sampling.temperature == 0:
        token = logits_BV.argmax(-1)
        return token, torch.zeros_like(token, dtype=torch.float32)
    probs_BV = logits_BV.softmax(-1)
    token = draw(probs_BV, uniform_B)
    return token, probs_BV.gather(1, token.unsqueeze(1)).squeeze(1).log()


def _stop_strings(
    requests: Sequence[Request], sampling: Sampling, tokenizer: PreTrainedTokenizerBase | None
) -> list[StopStrings]:
    """A watcher of stop strings for each output row; empty without stop strings."""
    stops = [r.under(sampling).stop for r in requests]
    if not any(stops):
        return []
    if tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    pairs = zip(requests, stops, strict=True)
    return [StopStrings(tokenizer, stop, r.token_ids) for r, stop in pairs for _ in range(r.n)]


def _uniforms(requests: Sequence[Request], max_tokens: int) -> Tensor:
    """A number in [0, 1) for every token that may be drawn, from each request's seed."""
    seeded = [(r.n, torch.Generator().manual_seed(r.seed)) for r in requests]
    return torch.cat([torch.rand(n, max_tokens, generator=seed, dtype=torch.float64) for n, seed in seeded])


def _gather(
    requests: Sequence[Request], drawn: Sequence[tuple[Tensor, ...]], limits: Sequence[int], version: int
) -> list[list[Completion]]:
    """Completions from the sampled steps. limits: the most tokens of each row.

    drawn: for each step the rows, positions, tokens, log-probs, and whether the token ends its row.
    """
    row, position, *of_tokens = (torch.cat(pieces) for pieces in zip(*drawn, strict=True))
    shape = len(limits), int(position.max()) + 1
    token_BT, logp_BT, ended_BT = (
        values.new_zeros(shape).index_put_((row, position), values).tolist() for values in of_tokens
    )
    made = []
    for ids, logp, ended, limit in zip(token_BT, logp_BT, ended_BT, limits, strict=True):
        stopped = any(ended[:limit])
        n = ended.index(True) + 1 if stopped else min(limit, len(ended))
        made.append(Completion(ids[:n], logp[:n], "stop" if stopped else "length", version))
    each = iter(made)
    return [list(islice(each, r.n)) for r in requests]


@lru_cache
def cache_argument(forward: Callable[..., Any]) -> str:
    """The argument of a model's forward that takes the cache: transformers 5.24 renames it."""
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


class PreallocatedKVLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [B, heads, L, D]: the first L positions of buffers, which double up to `limit`.

    Appending a token usually copies no earlier tokens, unlike in transformers' `DynamicCache`. buffer_dtype: the dtype
    of attention, which would otherwise cast all keys and values for every token. None: unchanged.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, limit: int, buffer_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.limit, self.buffer_dtype = limit, buffer_dtype
        self.lazy_initialization(keys, values)
        self._allocate(keys, values, 1)

    def _allocate(self, keys: Tensor, values: Tensor, more: int = 0) -> None:
        """Copy keys and values into new buffers with room for at least `more` tokens."""
        self.__dict__.update(keys=None, values=None, _keys=None, _values=None)  # free the old buffers first
        length = keys.shape[2]
        room = length if not more else max(min(2 * (length + more), self.limit), length + more)
        self._keys, self._values = (
            x.new_empty(*x.shape[:2], room, x.shape[3], dtype=self.buffer_dtype or x.dtype) for x in (keys, values)
        )
        self._keys[:, :, :length] = keys
        self._values[:, :, :length] = values
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, new = self.keys.shape[2], key_states.shape[2]
        end = start + new
        if end > self._keys.shape[2]:
            self._allocate(self.keys, self.values, new)
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self._allocate(self.keys[indices], self.values[indices], 1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)


def preallocate(cache: Any, tokens: int, dtype: torch.dtype | None = None) -> None:
    """Preallocate room for `tokens` more tokens, in `dtype`, in every `DynamicLayer`; leave other layers unchanged."""
    for number, layer in enumerate(cache.layers):  # layer by layer, so that each old one is freed before the next copy
        if type(layer) is DynamicLayer and layer.is_initialized:
            limit = layer.get_seq_length() + tokens
            cache.layers[number] = PreallocatedKVLayer(layer.keys, layer.values, limit, dtype)


@dataclass(slots=True)
class CachedRow:
    """Keys and values of the first `tokens` tokens of a row, without padding: the next batch pads differently."""

    tokens: int
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, [tokens, heads, D]; `fill_cache` empties the list."""
    version: int
    """Of the weights that computed them."""


def cached_row(cache: Any, attention_BL: Tensor | None, row: int, version: int) -> CachedRow | None:
    """A copy of a row of `cache`; None if a layer does not keep all tokens."""
    if not all(type(layer) is PreallocatedKVLayer for layer in cache.layers):
        return None
    keys = cache.layers[0].keys
    positions = torch.arange(keys.shape[2], device=keys.device)
    if attention_BL is not None:
        positions = positions[attention_BL[row].bool()]
    layers = [
        (layer.keys[row].transpose(0, 1)[positions], layer.values[row].transpose(0, 1)[positions])
        for layer in cache.layers
    ]
    return CachedRow(len(positions), layers, version)


def can_reuse(request: Request, version: int) -> bool:
    """Whether all the request's rows are cached and were computed with the current weights."""
    return bool(request.reusable_kv) and all(
        isinstance(reusable.state, CachedRow) and reusable.state.version == version for reusable in request.reusable_kv
    )


def fill_cache(requests: Sequence[Request], cache: Any, room: int) -> Tensor:
    """Move the requests' cached rows, layer by layer, into `cache`, with room for more tokens; their mask [B, L]."""
    rows: list[CachedRow] = []
    for request in requests:
        (reusable,) = request.reusable_kv
        rows.append(reusable.state)
        reusable.state = None
    longest = max(row.tokens for row in rows)
    cache.layers = []
    for _ in range(len(rows[0].layers)):
        pieces = [row.layers.pop(0) for row in rows]
        keys, values = (
            pad_sequence([piece[i] for piece in pieces], batch_first=True, padding_side="left").transpose(1, 2)
            for i in (0, 1)
        )
        del pieces
        cache.layers.append(PreallocatedKVLayer(keys, values, longest + room))
    tokens = torch.tensor([row.tokens for row in rows], device=keys.device)
    return (torch.arange(longest, device=keys.device) >= longest - tokens.unsqueeze(1)).long()


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
    """Attention of query [B, heads, N, D], key and value [B, heads / groups, L, D], as transformers calls it.

    Returns [B, N, heads, D]. Prompts, and tokens after an earlier turn (N > 1), use the usual attention.
    """
    if query.shape[2] > 1 or others.get("position_bias") is not None:
        from grpocli.models.shared_prompt_attention import attend as shared_prompt_attend

        key, value = key.to(query.dtype), value.to(query.dtype)  # keys and values cached in an earlier turn are float32
        given = {"dropout": dropout, "scaling": scaling, **others}
        return shared_prompt_attend(module, query, key, value, attention_mask, **given)
    how: Any = {"attn_mask": attention_mask, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    with torch.autocast("cpu", enabled=False):
        out = torch.nn.functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), **how)
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
