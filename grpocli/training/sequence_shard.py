"""hardware.context_parallel: a layout in which each of several processes has a share of a packed sequence's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch.nn.functional import pad

from grpocli.distributed.context_parallel import SharedAttention
from grpocli.hardware import to_device
from grpocli.training.packing import Packed, index_predictors, predictors

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.distributed.context_parallel import ContextParallel
    from grpocli.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShard(Packed):
    """This process's tokens of a packed sequence, and the completion tokens that they predict.

    whole: the sequence, the same in all processes. target_C: the indices of this process's targets among all
    completion tokens. input_ids, position_ids, keep_U and predictor_N are of this process's tokens, the other fields of
    the whole. `forward`, `spread` and `total` are collective among the processes. `shards_of` makes a class for them
    and for a layout of whole sequences.
    """

    whole: Packed
    target_C: Tensor
    processes: ClassVar[ContextParallel]
    layout: ClassVar[type[Packed]]

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device, on_cpu: bool | None = None) -> SequenceShard:
        whole, n, rank = cls.layout.build(rows, device, on_cpu), cls.processes.size, cls.processes.rank
        tokens = whole.input_ids.shape[1]
        # from `spans`, which are on the CPU, so that nothing waits for the device
        position_C = predictors(whole.spans)
        target_C = np.flatnonzero(position_C % n == rank)
        keep_U, predictor_N = index_predictors(position_C[target_C] // n)
        return cls(
            input_ids=_filled(whole.input_ids, n)[:, rank::n],
            position_ids=_filled(whole.position_ids, n)[:, rank::n],
            keep_U=to_device(torch.from_numpy(keep_U), device),
            predictor_N=to_device(torch.from_numpy(predictor_N), device),
            index_C=whole.index_C,
            completion=whole.completion,
            rows=whole.rows,
            segments=SharedAttention(whole.segments, tokens, cls.processes),
            spans=whole.spans,
            whole=whole,
            target_C=to_device(torch.from_numpy(target_C), device),
        )

    @classmethod
    def pack(cls, rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
        """Micro-batches of which each process has at most max_tokens tokens."""
        return cls.layout.pack(rows, max_tokens * cls.processes.size)

    @classmethod
    def size(cls, rows: Sequence[Row]) -> int:
        """The number of tokens that all processes together compute."""
        return cls.layout.size(rows)

    def targets(self, completion_ids_BT: Tensor) -> Tensor:
        """This process's target tokens [N], and filler."""
        ids_N = self.whole.targets(completion_ids_BT).index_select(0, self.target_C)
        return pad(ids_N, (0, len(self.predictor_N) - len(ids_N)))

    def spread(self, values_KN: Tensor) -> Tensor:
        """K values of each target of all processes as [K, B, T]; 0 at padding."""
        zeros = values_KN.new_zeros(len(values_KN), len(self.whole.predictor_N))
        own = zeros.index_copy(1, self.target_C, values_KN[:, : len(self.target_C)])
        return self.whole.spread(self.processes.sum(own))

    def members(self) -> Tensor:
        """[B, N] in float32: 1 where one of this process's N tokens is of a row, its prompt included."""
        member_BL, n = self.whole.members(), self.processes.size
        return pad(member_BL, (0, -member_BL.shape[1] % n))[:, self.processes.rank :: n]

    def total(self, part: Tensor) -> Tensor:
        """The sum over the processes of a sum over their tokens."""
        return self.processes.sum(part)


_SHARDS: dict[tuple[ContextParallel, type[Packed]], type[SequenceShard]] = {}


def shards_of(processes: ContextParallel, layout: type[Packed]) -> type[SequenceShard]:
    """The layout of processes that share each micro-batch. layout: of whole sequences."""
    if (key := (processes, layout)) not in _SHARDS:
        _SHARDS[key] = type("SequenceShard", (SequenceShard,), {"processes": processes, "layout": layout})
    return _SHARDS[key]


def _filled(values_1L: Tensor, n: int) -> Tensor:
    """The values, and their last one repeated until n divides their number: a real token, as in `Padded.build`."""
    filler = -values_1L.shape[1] % n
    return torch.cat([values_1L, values_1L[:, -1:].expand(1, filler)], 1) if filler else values_1L
