"""Packed rows through torch's `flex_attention`: one call a layer for the whole sequence.

The pattern is that of `shared_prompt_attention`. A `BlockMask` lists the tiles of TILE x TILE tokens that are not
empty, and has a function that decides for each pair of tokens in a partly filled tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpocli.hardware import to_device
from grpocli.models.frozen_linear import compute_dtype
from grpocli.models.shared_prompt_attention import cpu_sdpa

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    Array = NDArray[Any]

TILE = 128
"""Queries and keys of a tile."""
KERNEL = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": True}
"""One kernel for every length: the one for short sequences has no groups of three or seven heads. They are whole tiles,
which torch does not see in a length that is a symbol."""
BLOCKS = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "bwd_num_warps": 4} | {
    f"bwd_BLOCK_{side}": 64 for side in ("M1", "N1", "M2", "N2")
}
"""Options for heads of at most 128 in 16 bits. torch's own are larger, and slow in tiles that are partly filled: with
these and whole tiles, both passes of 30,000 tokens take half of the time on an H100."""


@dataclass(frozen=True, slots=True)
class TiledMask:
    """The tokens that each token of a packed sequence attends to, for `flex_attention`."""

    mask: BlockMask
    dense: Tensor | None = None
    """[N, N]: the same as values to add to scores, for a CPU, where torch's kernel has no backward pass."""

    @classmethod
    def build(cls, prompts: Sequence[tuple[int, Sequence[int]]], device: torch.device, on_cpu: bool) -> TiledMask:
        """The mask of a sequence. prompts: the tokens of each prompt, and of each of its completions, which follow."""
        mask = _block_mask(np.array(list(_spans(prompts))), device)
        return cls(mask, _dense(mask, device) if on_cpu else None)

    def dense_form(self) -> TiledMask:
        """The same without the kernel."""
        return replace(self, dense=_dense(self.mask, self.mask.kv_num_blocks.device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
        """query [1, heads, N, D], key and value [1, heads / groups, N, D] -> [1, N, heads, D].

        how: `dropout_p` and `scale`, as of `sdpa`. The kernel has no dropout.
        """
        dtype = compute_dtype(query)
        with torch.autocast(query.device.type, enabled=False):
            if self.dense is not None:
                groups = query.shape[1] // key.shape[1]
                out = cpu_sdpa(query, key, value, self.dense, groups, dtype, how)
            elif how["dropout_p"]:
                raise ValueError("flex_attention does not support dropout")
            else:
                options = KERNEL | (BLOCKS if query.shape[-1] <= 128 and dtype.itemsize == 2 else {})
                how = {"block_mask": self.mask, "scale": how["scale"], "enable_gqa": True, "kernel_options": options}
                out = _call(query.to(dtype), key.to(dtype), value.to(dtype), how)
        return out.transpose(1, 2).contiguous()


def _call(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
    """The kernel's output. Alone, it has one graph for states with a gradient, without, and for a mixture (LoRA)."""
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():  # as a part of a decoder layer's graph
        inlined: Tensor = flex_attention(query, key, value, **how)
        return inlined
    has_gradient = torch.is_grad_enabled()
    with torch.enable_grad():
        states = (one if one.requires_grad else one.detach().requires_grad_() for one in (query, key, value))
        out = _kernel()(*states, **how)
    return out if has_gradient else out.detach()


@cache
def _kernel() -> Callable[..., Tensor]:
    """torch's kernel, compiled for sequences of any length. `fullgraph`: an error instead of its slow form."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


def for_any_size() -> AbstractContextManager[None]:
    """A block in which graphs are compiled for sizes that may differ, though two are equal by chance."""
    from torch.fx.experimental import _config

    block: AbstractContextManager[None] = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return block


def _spans(prompts: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, length, prompt start, prompt length) of each prompt and completion."""
    start = 0
    for n_prompt, lengths in prompts:
        first = start
        for n, n_before in ((n_prompt, 0), *((n, n_prompt) for n in lengths)):
            yield start, n, first, n_before
            start += n


def _block_mask(spans_S4: Array, device: torch.device) -> BlockMask:
    """The `BlockMask` of spans, by numpy: each little operation of torch would wake a thread on every core."""
    from torch.nn.attention.flex_attention import BlockMask

    start_S, n_S, first_S, n_before_S = spans_S4.T
    bounds_3N = np.repeat(np.stack([start_S, first_S, first_S + n_before_S]), n_S, axis=1).astype(np.int32)
    own_N, first_N, end_N = (to_device(torch.from_numpy(bound_N), device) for bound_N in bounds_3N)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_own: Tensor = (key >= own_N[query]) & (key <= query)
        in_prompt: Tensor = (key >= first_N[query]) & (key < end_N[query])
        return in_own | in_prompt

    length = bounds_3N.shape[1]
    pairs_MM = _pairs(spans_S4, -(-length // TILE))
    full_MM = pairs_MM == TILE * TILE
    partial_MM = (pairs_MM > 0) & ~full_MM
    tiles_4MM = np.stack([partial_MM, full_MM, partial_MM.T, full_MM.T])
    # of each row of tiles: how many there are, and their indices, which come first
    counts_4M = to_device(torch.from_numpy(tiles_4MM.sum(2, dtype=np.int32)), device)
    index_4MM = to_device(torch.from_numpy(np.argsort(~tiles_4MM, axis=2, kind="stable").astype(np.int32)), device)
    kv, full_kv, q, full_q = zip(counts_4M[:, None, None], index_4MM[:, None, None], strict=True)
    return BlockMask((length, length), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=(TILE, TILE), mask_mod=attends)


def _pairs(spans_S4: Array, tiles: int) -> Array:
    """How many pairs of a query and a key that it attends to each tile has [queries, keys], M x M."""
    pairs_MM = np.zeros((tiles, tiles), np.int64)
    for start, n, first, n_before in spans_S4.tolist():
        (own, own_O), (prompt, prompt_P) = _overlap(start, n), _overlap(first, n_before)
        pairs_MM[own, prompt] += np.outer(own_O, prompt_P)
        pairs_MM[own, own] += np.tril(np.outer(own_O, own_O), -1) + np.diag(own_O * (own_O + 1) // 2)
    return pairs_MM


def _overlap(start: int, n: int) -> tuple[slice, Array]:
    """The tiles in which a span has tokens, and how many it has in each."""
    tiles = slice(start // TILE, -(-(start + n) // TILE))
    edge_O = np.arange(tiles.start, tiles.stop) * TILE
    return tiles, np.minimum(edge_O + TILE, start + n) - np.maximum(edge_O, start)


def _dense(mask: BlockMask, device: torch.device) -> Tensor:
    """The mask [N, N] as values to add to scores."""
    from torch.nn.attention.flex_attention import create_mask

    attends_NN = create_mask(mask.mask_mod, None, None, *mask.seq_lengths, device=device)[0, 0]
    return torch.zeros(attends_NN.shape, device=device).masked_fill(~attends_NN, float("-inf"))
