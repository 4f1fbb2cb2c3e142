"""Packed rows through torch's `flex_attention`: one call a layer for the whole sequence.

The attention pattern is that of `shared_prompt_attention`. A `BlockMask` lists the tiles of TILE x TILE tokens that are
not empty, and has a function that decides for each pair of tokens in a tile that is only partly filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from grpocli.hardware.devices import to_device
from grpocli.models import sdpa
from grpocli.models.frozen_linear import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128
"""Queries and keys of a tile."""
KERNEL = {"FORCE_USE_FLEX_ATTENTION": True}
"""One kernel for sequences of every length: the one for short ones has no groups of three or seven heads."""


@dataclass(frozen=True, slots=True)
class TiledMask:
    """The tokens that each token of a packed sequence attends to, for `flex_attention`.

    dense [N, N]: the same as values to add to scores, for a CPU, where torch's kernel has no backward pass. Its memory
    is quadratic in the tokens of a micro-batch. None: the kernel is called.
    """

    mask: BlockMask
    dense: Tensor | None = None

    @classmethod
    def build(cls, prompts: Sequence[tuple[int, Sequence[int]]], device: torch.device, on_cpu: bool) -> TiledMask:
        """The mask of a sequence. prompts: the tokens of each prompt, and of each of its completions, which follow."""
        spans_S4 = torch.tensor(list(_spans(prompts)))
        mask = _block_mask(spans_S4, device)
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
                out = sdpa.on_cpu(query, key, value, self.dense, groups, dtype, how)
            elif how["dropout_p"]:
                raise ValueError("flex_attention does not support dropout")
            else:
                how = {"block_mask": self.mask, "scale": how["scale"], "enable_gqa": True, "kernel_options": KERNEL}
                out = _call(query.to(dtype), key.to(dtype), value.to(dtype), how)
        return out.transpose(1, 2).contiguous()


def _call(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
    """The kernel's output. Alone, it has one graph for states with a gradient, without, and for a mixture (LoRA)."""
    if torch.compiler.is_compiling():  # as a part of a decoder layer's graph
        from torch.nn.attention.flex_attention import flex_attention

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
    """A block in which torch compiles graphs for sizes that are equal by chance, such as two tiles and two heads.

    Otherwise they would be compiled again for a micro-batch in which these differ.
    """
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


def _block_mask(spans_S4: Tensor, device: torch.device) -> BlockMask:
    """The `BlockMask` of spans, computed on the CPU and moved without waiting for the device."""
    from torch.nn.attention.flex_attention import BlockMask

    start_S, n_S, first_S, n_before_S = spans_S4.unbind(1)
    own_N, first_N, end_N = (
        to_device(one_S.int().repeat_interleave(n_S), device) for one_S in (start_S, first_S, first_S + n_before_S)
    )

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_own = (key >= own_N[query]) & (key <= query)
        in_prompt = (key >= first_N[query]) & (key < end_N[query])
        return in_own | in_prompt

    length = int(n_S.sum())
    pairs_MM = _pairs(spans_S4, -(-length // TILE))
    full_MM = pairs_MM == TILE * TILE
    partial_MM = (pairs_MM > 0) & ~full_MM
    kv, full_kv, q, full_q = (_table(one, device) for one in (partial_MM, full_MM, partial_MM.T, full_MM.T))
    return BlockMask((length, length), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=(TILE, TILE), mask_mod=attends)


def _pairs(spans_S4: Tensor, tiles: int) -> Tensor:
    """How many pairs of a query and a key that it attends to each tile has [queries, keys], M x M."""
    start_S, n_S, first_S, n_before_S = spans_S4.unbind(1)
    own_SM, prompt_SM = _overlaps(start_S, n_S, tiles), _overlaps(first_S, n_before_S, tiles)
    triangles_M = (own_SM * (own_SM + 1) / 2).sum(0)  # of a span with itself, in one tile
    return own_SM.T @ prompt_SM + (own_SM.T @ own_SM).tril(-1) + triangles_M.diag()


def _overlaps(start_S: Tensor, n_S: Tensor, tiles: int) -> Tensor:
    """The number of tokens of each span in each tile [S, M], in float64, which autocast leaves alone."""
    edge_M = torch.arange(tiles) * TILE
    start_S1, end_S1 = start_S.unsqueeze(1), (start_S + n_S).unsqueeze(1)
    return (end_S1.minimum(edge_M + TILE) - start_S1.maximum(edge_M)).clamp(min=0).double()


def _table(tiles_MM: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of tiles in each row [1, 1, M], and their indices, which come first in [1, 1, M, M]."""
    tiles_MM = tiles_MM.int().contiguous()
    index_MM = tiles_MM.argsort(dim=1, descending=True, stable=True)
    return to_device(tiles_MM.sum(1).int()[None, None], device), to_device(index_MM.int()[None, None], device)


def _dense(mask: BlockMask, device: torch.device) -> Tensor:
    """The mask [N, N] as values to add to scores."""
    from torch.nn.attention.flex_attention import create_mask

    attends_NN = create_mask(mask.mask_mod, None, None, *mask.seq_lengths, device=device)[0, 0]
    return torch.zeros(attends_NN.shape, device=device).masked_fill(~attends_NN, float("-inf"))
