"""A key-value cache with room for what comes: a new token does not copy those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.types import Request


class PreallocatedKVLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [B, heads, L, D]: the first L places of buffers, which double up to `most` places.

    dtype: what they are held in, that of attention, which would cast all of them again for every token. None: own.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, most: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.most, self.held = most, dtype
        self.lazy_initialization(keys, values)
        self._hold(keys, values, 1)

    def _hold(self, keys: Tensor, values: Tensor, more: int = 0) -> None:
        """From now on; `more` tokens are to come."""
        self.__dict__.update(keys=None, values=None, _keys=None, _values=None)  # freed first
        length = keys.shape[2]
        room = length if not more else max(min(2 * (length + more), self.most), length + more)
        self._keys, self._values = (
            x.new_empty(*x.shape[:2], room, x.shape[3], dtype=self.held or x.dtype) for x in (keys, values)
        )
        self._keys[:, :, :length] = keys
        self._values[:, :, :length] = values
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, new = self.keys.shape[2], key_states.shape[2]
        end = start + new
        if end > self._keys.shape[2]:
            self._hold(self.keys, self.values, new)
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self._hold(self.keys[indices], self.values[indices], 1)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._hold(self.keys.repeat_interleave(repeats, 0), self.values.repeat_interleave(repeats, 0), 1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        self._hold(self.keys[:, :, :0], self.values[:, :, :0], 1)


def make_room(cache: Any, tokens: int, dtype: torch.dtype | None = None) -> None:
    """For `tokens` more in each layer that keeps them all, held in `dtype`; other kinds of layers stay as they are."""
    for number, layer in enumerate(cache.layers):  # one at a time: the old one is freed before the next is made
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[number] = PreallocatedKVLayer(layer.keys, layer.values, layer.get_seq_length() + tokens, dtype)


@dataclass(slots=True)
class Kept:
    """The first `tokens` of a row. layers: keys and values of each, [tokens, heads, D]; they are given away once.

    version: of the weights that computed them.
    """

    tokens: int
    layers: list[tuple[Tensor, Tensor]]
    version: int


def kept(cache: Any, attention_BL: Tensor | None, row: int, version: int) -> Kept | None:
    """A copy of what `cache` has of a row of the batch; None where a layer does not keep all tokens."""
    if not all(type(layer) is PreallocatedKVLayer for layer in cache.layers):
        return None
    keys = cache.layers[0].keys
    places = torch.arange(keys.shape[2], device=keys.device)
    if attention_BL is not None:
        places = places[attention_BL[row].bool()]
    layers = [
        (layer.keys[row].transpose(0, 1)[places], layer.values[row].transpose(0, 1)[places]) for layer in cache.layers
    ]
    return Kept(len(places), layers, version)


def goes_on(request: Request, version: int) -> bool:
    """Whether what was kept for it is there, and of the present weights."""
    return bool(request.pasts) and all(
        isinstance(past.held, Kept) and past.held.version == version for past in request.pasts
    )


def resume(requests: Sequence[Request], cache: Any, room: int) -> Tensor:
    """Fill `cache` with what was kept for each, with room for so many tokens more; which places of it count [B, L].

    Layer by layer, so that nothing is there twice.
    """
    rows: list[Kept] = []
    for request in requests:
        (past,) = request.pasts
        rows.append(past.held)
        past.held = None
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
