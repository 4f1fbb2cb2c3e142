"""The reference of a run with teachers (`algorithm.kl.model`, `algorithm.kl.base_url`): each scores its tasks' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from grpocli.algorithm.kl import EVERY_TASK
from grpocli.errors import ServiceGone
from grpocli.hardware import to_device
from grpocli.models.teacher import teachers_of
from grpocli.progress import Progress, unreported
from grpocli.training.micro_batch import MicroBatch, RowBatch
from grpocli.training.packing import padded
from grpocli.training.policy import Reference
from grpocli.training.served_teacher import Scoring, ServedTeacher, served_teachers
from grpocli.types import Row

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.distributed.context_parallel import ContextParallel
    from grpocli.distributed.world import World
    from grpocli.training.policy import Policy
    from grpocli.types import Sampling


class LoadedTeacher(Reference):
    """A teacher in this process, of any architecture. tasks: the names of those that it scores.

    `grpocli.training.packing_check` sets `at_head`, as the policy's.
    """

    at_head = True

    def __init__(self, model: Any, policy: Policy, tasks: Sequence[str]) -> None:
        super().__init__(model, policy)
        self.tasks, self.parallel = tasks, policy.parallel

    def mix(self, alpha: float) -> None:
        raise TypeError("a teacher does not follow the policy")


@dataclass
class Teachers:
    """The teachers of a run, as its reference.

    scoring: this step's requests to servers. shared_with: the processes with the same rows, of which one asks servers.
    """

    loaded: list[LoadedTeacher]
    served: list[ServedTeacher] = field(default_factory=list)
    scoring: list[Scoring] = field(default_factory=list)
    shared_with: ContextParallel | None = None

    @property
    def models(self) -> list[Any]:
        """The models in this process."""
        return [teacher.model for teacher in self.loaded]

    def begin(self, micro_batches: Sequence[RowBatch]) -> None:
        """Send this process's rows of the step to the servers, all at once."""
        asks = self.shared_with is None or self.shared_with.is_first
        rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
        self.scoring = [teacher.begin([r for r in rows if scores(teacher.tasks, r)]) for teacher in self.served if asks]

    def score(self, micro_batch: RowBatch, batch: MicroBatch, sampling: Sampling) -> None:
        """Set `ref_logp` of the rows of loaded teachers, and 0 for others.

        Collective if weights are sharded: a process without rows for a teacher then scores an empty one.
        """
        ref_BT = micro_batch.known["ref_logp"] = torch.zeros_like(batch.rollout_logp)
        for teacher in self.loaded:
            own = [k for k, row in enumerate(micro_batch.rows) if scores(teacher.tasks, row)]
            if len(own) == len(micro_batch.rows):
                ref_BT.copy_(teacher.logp(batch, sampling))
            elif own or not teacher.parallel.replicated:
                scored = [micro_batch.rows[k] for k in own] or [Row.empty()]
                own_batch = MicroBatch.build(scored, batch.mask.device, type(batch.layout))
                logp_bT = teacher.logp(own_batch, sampling)
                if own:
                    ref_BT[own, : logp_bT.shape[1]] = logp_bT

    def finish(self, micro_batches: Sequence[RowBatch], world: World, progress: Progress = unreported) -> None:
        """Wait for the servers, and set `ref_logp` of their rows. Collective.

        Raises ServiceGone, in every process, if a server cannot be reached or misses its deadline, and RunError if it
        refuses a request. No weight has changed then.
        """
        if not self.served:
            return
        world.enter("teacher")
        problems = [problem for one in self.scoring if (problem := one.wait(progress))]
        self.scoring = []
        everyones = world.gather_objects(problems)
        for problem in sorted(everyones, key=lambda one: isinstance(one, ServiceGone)):
            raise problem
        rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
        if self.shared_with and rows:
            received = self.shared_with.from_first([row.ref_logp for row in rows])
            for row, values in zip(rows, received, strict=True):
                row.ref_logp = values
        for micro_batch in micro_batches:
            served_B1 = to_device(torch.tensor([[row.ref_logp is not None] for row in micro_batch.rows]), world.device)
            ref_BT = to_device(
                padded([row.ref_logp or [0.0] * len(row.completion_ids) for row in micro_batch.rows]), world.device
            )
            micro_batch.known["ref_logp"] = ref_BT.where(served_B1, micro_batch.known.get("ref_logp", ref_BT))

    def mix(self, alpha: float) -> None:
        raise TypeError("a teacher does not follow the policy")

    def close(self) -> None:
        """Cancel the requests that are running."""
        for one in self.scoring:
            one.cancel()


def load_teachers(run: Run, policy: Policy) -> Teachers:
    """The teachers of a run, with the weights of those that are loaded. Collective."""
    kl = run.algorithm.kl
    loaded = [LoadedTeacher(one.load(), policy, one.tasks) for one in teachers_of(kl, run.model)]
    return Teachers(loaded, served_teachers(kl), shared_with=policy.shared_with)


def loaded_teachers(reference: Reference | Teachers | None) -> list[LoadedTeacher]:
    """The teachers in this process; empty for any other reference."""
    return reference.loaded if isinstance(reference, Teachers) else []


def scores(tasks: Sequence[str], row: Row) -> bool:
    """Whether a teacher of these tasks scores a row."""
    return EVERY_TASK in tasks or row.task in tasks
