"""Keys and values that are kept between turns: a request that goes on from a completion computes what is new alone.

Rows are kept without their padding, each for itself: by its next turn a batch has other rows, of other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from grpocli.rollout.kv_cache import RoomyLayer

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.types import Request


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
    if not all(type(layer) is RoomyLayer for layer in cache.layers):
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
        cache.layers.append(RoomyLayer(keys, values, longest + room))
    tokens = torch.tensor([row.tokens for row in rows], device=keys.device)
    return (torch.arange(longest, device=keys.device) >= longest - tokens.unsqueeze(1)).long()
