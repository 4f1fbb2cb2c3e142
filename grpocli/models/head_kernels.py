"""Triton kernels of a GPU's output head: scores from logits in one pass, and the gradient of logits in place.

A program of a kernel computes one row, or one block of a row, so that sums have one order and a run repeats to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

LEAST = tl.constexpr(torch.finfo(torch.float32).min)
FARTHEST = tl.constexpr(-1e4)
"""A logit relative to the largest, where exp is 0: 0 * -inf would be no number."""


def scores(logits_nV: Tensor, ids_n: Tensor, temperature: float) -> Tensor:
    """Log-probs of the ids, entropies, whether the ids are the most probable ones, and normalizers: [4, n]."""
    (n, vocabulary), found_4n = logits_nV.shape, logits_nV.new_empty(4, len(ids_n), dtype=torch.float32)
    _scores[(n,)](logits_nV, ids_n, found_4n, n, vocabulary, 1 / temperature, **_block(vocabulary, 4096))
    return found_4n


def gradient_(
    logits_nv: Tensor, ids_n: Tensor, normalizer_n: Tensor, gradient_n: Tensor, start: int, temperature: float
) -> None:
    """Replace logits of the tokens from `start` on by their gradient, in their dtype.

    gradient_n: of the log-probs, divided by the temperature.
    """
    n, columns = logits_nv.shape
    block = _block(columns, 2048)
    grid = n, triton.cdiv(columns, block["BLOCK"])
    _gradient[grid](logits_nv, ids_n, normalizer_n, gradient_n, start, columns, 1 / temperature, **block)


def _block(columns: int, largest: int) -> dict[str, int]:
    block = min(largest, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": max(1, block // 512), "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _scores(logits, ids, found, rows, columns, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """An online softmax, which keeps the largest logit so far and, relative to it, the sums of `_row_scores`."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    largest = LEAST
    sums = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        block = tl.load(logits + row * columns + start + offsets, mask=inside, other=float("-inf"))
        block = block.to(tl.float32) * scale
        before = largest
        largest = tl.maximum(before, tl.max(block, 0))
        less = before - largest
        weighted = tl.exp(less) * (weighted + less * sums)
        apart = tl.maximum(block - largest, FARTHEST, propagate_nan=tl.PropagateNan.ALL)
        weights = tl.exp(apart)
        sums = tl.exp(less) * sums + weights
        weighted += weights * apart
    total = tl.sum(sums, 0)
    logarithm = tl.log(total)
    chosen = tl.load(logits + row * columns + tl.load(ids + row)).to(tl.float32) * scale
    tl.store(found + row, chosen - largest - logarithm)
    tl.store(found + rows + row, logarithm - tl.sum(weighted, 0) / total)
    tl.store(found + 2 * rows + row, (chosen >= largest).to(tl.float32))
    tl.store(found + 3 * rows + row, largest + logarithm)


@triton.jit(do_not_specialize=["start"])  # type: ignore[untyped-decorator]
def _gradient(logits, ids, normalizers, gradients, start, columns, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 at the chosen token) - probabilities, times the gradient of the log-prob."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    place = logits + row * columns + offsets
    logit = tl.load(place, mask=inside).to(tl.float32) * scale
    probability = tl.exp(logit - tl.load(normalizers + row))
    chosen = (start + offsets == tl.load(ids + row)).to(tl.float32)
    gradient = (chosen - probability) * tl.load(gradients + row)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=inside)
