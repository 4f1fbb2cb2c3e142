"""From rollouts to micro-batches: rows are ragged until a micro-batch is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpocli.hardware.devices import to_device
from grpocli.training.packing import Layout, Padded, pad
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors that the loss takes. `layout` holds the same rows as the model's forward takes them.

    completion_ids, mask, rollout_logp, old_logp, ref_logp, selected [B, T]; advantages, group_ids [B]. old_logp is NaN
    in rows without old log-probs.
    """

    layout: Layout
    completion_ids: Tensor
    mask: Tensor
    advantages: Tensor
    group_ids: Tensor
    rollout_logp: Tensor
    old_logp: Tensor | None
    ref_logp: Tensor | None
    selected: Tensor | None

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, layout: type[Layout] = Padded) -> MicroBatch:
        """The rows, padded, on `device`."""
        return cls(
            layout=layout.build(rows, device),
            completion_ids=to_device(pad([torch.tensor(r.completion_ids, dtype=torch.long) for r in rows]), device),
            mask=to_device(pad([torch.tensor(r.mask, dtype=torch.long) for r in rows]), device),
            advantages=to_device(torch.tensor([r.advantage for r in rows]), device),
            group_ids=to_device(torch.tensor([r.group for r in rows]), device),
            rollout_logp=to_device(pad([torch.tensor(r.rollout_logp) for r in rows]), device),
            old_logp=_pad_optional(rows, [r.old_logp for r in rows], device),
            ref_logp=_pad_optional(rows, [r.ref_logp for r in rows], device),
            selected=_pad_optional(rows, [r.selected for r in rows], device),
        )


def _pad_optional(rows: Sequence[Row], values: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Pad optional values of rows to [B, T], NaN in rows without one; None if no row has any."""
    if all(v is None for v in values):
        return None
    unknown = [torch.full((len(r.completion_ids),), float("nan"), device=device) for r in rows]
    return pad([u if v is None else to_device(v, device) for u, v in zip(unknown, values, strict=True)])


def group_spans(n_groups: int, minibatches: int) -> list[range]:
    """The groups of each window of an epoch (one optimizer update); sizes differ by at most one group, none is 0."""
    pieces = min(minibatches, n_groups)
    edges = [n_groups * i // pieces for i in range(pieces + 1)] if pieces else []
    return [range(a, b) for a, b in pairwise(edges)]
