"""A key-value cache with room for what comes: a new token does not copy those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [B, heads, L, D]: the first L places of buffers that have `room` of them."""

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        super().__init__()
        self.room = room
        self.lazy_initialization(layer.keys, layer.values)
        self._hold(layer.keys, layer.values)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self.room = max(self.room, keys.shape[2])
        self._keys, self._values = (x.new_empty(*x.shape[:2], self.room, x.shape[3]) for x in (keys, values))
        self.keys, self.values = self._keys[:, :, :0], self._values[:, :, :0]
        self.update(keys, values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self.room:
            self.room = 2 * end
            self._hold(self.keys, self.values)
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self._hold(self.keys[indices], self.values[indices])


def make_room(cache: Any, tokens: int) -> None:
    """For `tokens` more in each layer that keeps them all; other kinds of layers stay as they are."""
    cache.layers = [
        RoomyLayer(layer, layer.get_seq_length() + tokens) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
