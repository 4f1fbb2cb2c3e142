"""The reference of a run with teachers (`algorithm.kl.model`): each scores its tasks' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpocli.algorithm.kl import EVERY_TASK
from grpocli.models.teacher import teachers_of
from grpocli.training.packing import MicroBatch, RowBatch
from grpocli.training.policy import Reference
from grpocli.types import Row

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.training.policy import Policy
    from grpocli.types import Sampling


class LoadedTeacher(Reference):
    """A teacher, of any architecture."""

    at_head = True
    """As the policy's; `grpocli.training.trials` sets it."""

    def __init__(self, model: Any, policy: Policy, tasks: Sequence[str]) -> None:
        """tasks: the names of those that it scores."""
        super().__init__(model, policy)
        self.tasks, self.parallel = tasks, policy.parallel

    def scores(self, row: Row) -> bool:
        """Whether a row is of its tasks."""
        return EVERY_TASK in self.tasks or row.task in self.tasks


@dataclass
class Teachers:
    """The teachers of a run, as its reference."""

    loaded: list[LoadedTeacher]

    @property
    def models(self) -> list[Any]:
        """The teachers' models."""
        return [teacher.model for teacher in self.loaded]

    def score(self, micro_batch: RowBatch, batch: MicroBatch, sampling: Sampling) -> None:
        """Set `ref_logp` of a micro-batch.

        Collective if weights are sharded: a process without rows for a teacher then scores an empty one.
        """
        ref_BT = micro_batch.known["ref_logp"] = torch.zeros_like(batch.rollout_logp)
        for teacher in self.loaded:
            own = [k for k, row in enumerate(micro_batch.rows) if teacher.scores(row)]
            if len(own) == len(micro_batch.rows):
                ref_BT.copy_(teacher.logp(batch, sampling))
            elif own or not teacher.parallel.replicated:
                scored = [micro_batch.rows[k] for k in own] or [Row.empty()]
                own_batch = MicroBatch.build(scored, batch.mask.device, type(batch.layout))
                logp_bT = teacher.logp(own_batch, sampling)
                if own:
                    ref_BT[own, : logp_bT.shape[1]] = logp_bT


def load_teachers(run: Run, policy: Policy) -> Teachers:
    """The teachers of a run. Collective."""
    return Teachers([LoadedTeacher(one.load(), policy, one.tasks) for one in teachers_of(run.algorithm.kl, run.model)])


def loaded_teachers(reference: Reference | Teachers | None) -> list[LoadedTeacher]:
    """The teachers; empty for any other reference."""
    return reference.loaded if isinstance(reference, Teachers) else []
