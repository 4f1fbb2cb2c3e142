"""grpocli's side of the comparisons with `peer_sides`, and the inputs of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from parity.peer_cases import PeerCase, overrides
from parity.peer_sides import SIDES, Rows, Side, mask_of
from parity.table import Table
from parity.trl_side import random_batch
from torch import Tensor

from grpocli import build_algorithm
from grpocli.algorithm import Algorithm

SEEDS = range(20)
GROUP = 4
LENGTHS = (3, 7, 1, 5, 6, 2, 4, 7)
GUARD = 1e-8


def side(peer: str) -> Side:
    """The peer's side; skips the test where its files are not here."""
    found = SIDES[peer]
    if found.source.missing:
        pytest.skip(found.source.missing)
    return found


def random_rows(seed: int, kind: str = "updated", lengths: tuple[int, ...] = LENGTHS) -> Rows:
    """Ratios far enough from 1 to reach every bound, for both signs of the advantage; one advantage is 0."""
    if kind == "one empty":
        lengths = (*lengths[:-1], 0)
    batch = random_batch(torch.float64, seed, lengths)
    old, ref, sampler = (v.clamp(max=-0.01) for v in (batch.old_logp, batch.ref_logp, batch.rollout_logp))
    generator = torch.Generator().manual_seed(seed + 1000)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    advantages[-1] = 0.0
    rows = Rows(
        batch.logp.clone().requires_grad_(),
        old,
        ref,
        sampler,
        mask_of(torch.tensor(lengths)),
        advantages,
    )
    if kind == "near":
        small = [batch.logp + 0.1 * (other - batch.logp) for other in (old, sampler)]
        return replace(rows, old=small[0], sampler=small[1])
    if kind == "first":
        return replace(rows, old=batch.logp)
    return replace(rows, sampler=rows.old) if kind == "no gap" else rows


def ours(algorithm: Algorithm, rows: Rows, **changed: Any) -> Tensor:
    """grpocli's loss. changed: arguments of `loss` instead of those of the rows."""
    tensors = {
        "logp": rows.logp,
        "old_logp": rows.old,
        "advantages": rows.advantages,
        "mask": rows.mask,
        "group_ids": torch.arange(len(rows.mask)) // GROUP,
        "ref_logp": rows.ref,
        "rollout_logp": rows.sampler,
    }
    return algorithm.loss(**{**tensors, **changed})[0]


def gradient(loss: Tensor, rows: Rows) -> Tensor:
    (found,) = torch.autograd.grad(loss, rows.logp)
    return found


@cache
def built(words: str, guard: str = "") -> Algorithm:
    """The algorithm of `overrides(words)`, with a peer's guard against a division by 0."""
    algorithm = build_algorithm(*overrides(words))
    return replace(algorithm, aggregate=Guarded(algorithm.aggregate, guard)) if guard else algorithm


@dataclass(frozen=True)
class Guarded:
    """An aggregate whose denominators n are n + 1e-8."""

    inner: Any
    guard: str

    def __call__(self, mask_BT: Tensor, group_ids_B: Tensor, totals: Any) -> Tensor:
        weight_B = self.inner(mask_BT, group_ids_B, totals)
        if self.guard in ("rows", "batch"):
            weight_B = weight_B * _guarded(mask_BT.sum(1))
        if self.guard != "rows":
            weight_B = weight_B * _guarded(torch.tensor(totals.rows if self.guard == "batch" else totals.tokens))
        return weight_B

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _guarded(n: Tensor) -> Tensor:
    return n.double() / (n.double() + GUARD)


def compare(table: Table, case: PeerCase, rows: Rows) -> None:
    """Loss and gradient of the same rows, in float64."""
    dtype = torch.float32 if case.single else torch.float64
    theirs = side(case.peer).loss(rows, **case.settings)
    advantages = rows.advantages * 0 if case.distilled else rows.advantages
    mine = ours(built(case.ours, case.guard), rows, advantages=advantages)
    if case.value:
        table.compare(str(case), "value", mine, theirs, dtype, case.limit)
    slope = gradient(mine, rows)
    assert slope.any(), "there is nothing to compare"
    table.compare(str(case), "gradient", slope, gradient(theirs, rows), dtype, case.limit)
