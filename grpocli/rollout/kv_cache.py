"""KV cache for sampling: preallocated buffers, and cached rows that the next turn of an episode reuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.types import Request


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

    def reset(self) -> None:
        self._allocate(self.keys[:, :, :0], self.values[:, :, :0], 1)


def preallocate(cache: Any, tokens: int, dtype: torch.dtype | None = None) -> None:
    """Preallocate room for `tokens` more tokens in every `DynamicLayer`; leave other layers unchanged.

    dtype: dtype of the buffers; see `PreallocatedKVLayer`.
    """
    for number, layer in enumerate(cache.layers):  # layer by layer, so that each old one is freed before the next copy
        if type(layer) is DynamicLayer and layer.is_initialized:
            limit = layer.get_seq_length() + tokens
            cache.layers[number] = PreallocatedKVLayer(layer.keys, layer.values, limit, dtype)


@dataclass(slots=True)
class CachedRow:
    """Keys and values of the first `tokens` tokens of a row, without padding, because the next batch pads differently.

    layers: keys and values of each layer, [tokens, heads, D]; `fill_cache` empties the list.
    version: version of the weights that computed them.
    """

    tokens: int
    layers: list[tuple[Tensor, Tensor]]
    version: int


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
    """Move the requests' cached rows into `cache`, with room for `room` more tokens; return their mask [B, L].

    Works layer by layer, so that no more than one layer is in memory twice.
    """
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
