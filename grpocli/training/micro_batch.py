"""From rollouts to micro-batches: rows are ragged until a micro-batch is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grpocli.hardware import to_device
from grpocli.training.packing import Layout, Padded, padded, present
from grpocli.types import Group, Row

if TYPE_CHECKING:
    from grpocli.algorithm import Algorithm


def rows_of(groups: Sequence[Group], advantages_PG: Tensor, algorithm: Algorithm, version: int) -> list[Row]:
    """One row for each completion, with its advantage. version: the weight version that the step trains."""
    return [
        Row.of(
            rollout,
            advantage * group.prompt.loss_multiplier,
            number,
            algorithm.keep.mask_truncated,
            algorithm.old_is_sampler(stale=rollout.completion.version < version),
        )
        for number, (group, advantages) in enumerate(zip(groups, advantages_PG.tolist(), strict=True))
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    ]


@dataclass(slots=True)
class RowBatch:
    """The rows of a micro-batch, and what is known of their tokens so far: by name, [B, T], padded as `MicroBatch`.

    NaN where a value is unknown. Names are those of fields of `Row`, and `selected`: 1 for tokens in the
    policy-gradient term (without it: all).
    """

    rows: list[Row]
    known: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: list[Row], device: torch.device) -> RowBatch:
        """The rows with the log-probs that they bring along."""
        known = {}
        if any(row.old_logp is not None for row in rows):
            values = [row.old_logp or [math.nan] * len(row.completion_ids) for row in rows]
            known["old_logp"] = to_device(padded(values), device)
        return cls(rows, known)

    def set_missing(self, name: str, values_BT: Tensor) -> None:
        """Set values where they are unknown; those of the sampler or of an earlier update stay."""
        known_BT = self.known.get(name)
        self.known[name] = values_BT if known_BT is None else values_BT.where(known_BT.isnan(), known_BT)

    def tokens(self, names: Sequence[str]) -> Tensor:
        """K kinds of values of all tokens, row by row [K, N]; NaN where they are unknown."""
        index_N = torch.from_numpy(np.flatnonzero(present([row.completion_ids for row in self.rows])))
        unknown_BT = torch.full_like(next(iter(self.known.values())), math.nan)
        values_KBT = torch.stack([self.known.get(name, unknown_BT) for name in names])
        return values_KBT.flatten(1).index_select(1, to_device(index_N, values_KBT.device))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of rows that no update changes. `layout` holds the same rows as the model's forward takes them.

    completion_ids, mask, rollout_logp [B, T]; advantages, group_ids [B].
    """

    layout: Layout
    completion_ids: Tensor
    mask: Tensor
    advantages: Tensor
    group_ids: Tensor
    rollout_logp: Tensor

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, layout: type[Layout] = Padded) -> MicroBatch:
        """The rows, padded, on `device`."""
        return cls(
            layout=layout.build(rows, device),
            completion_ids=to_device(padded([r.completion_ids for r in rows], np.int64), device),
            mask=to_device(padded([r.mask for r in rows], np.int64), device),
            advantages=to_device(torch.tensor([r.advantage for r in rows]), device),
            group_ids=to_device(torch.tensor([r.group for r in rows]), device),
            rollout_logp=to_device(padded([r.rollout_logp for r in rows]), device),
        )


def group_spans(n_groups: int, minibatches: int) -> list[range]:
    """The groups of each window of an epoch (one optimizer update); sizes differ by at most one group, none is 0."""
    pieces = min(minibatches, n_groups)
    edges = [n_groups * i // pieces for i in range(pieces + 1)] if pieces else []
    return [range(a, b) for a, b in pairwise(edges)]
