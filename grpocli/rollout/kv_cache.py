"""A key-value cache with room for what comes: a new token does not copy those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
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
            cache.layers[number] = RoomyLayer(layer.keys, layer.values, layer.get_seq_length() + tokens, dtype)
