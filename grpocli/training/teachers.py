"""The reference of a run with teachers (`algorithm.kl.model`, `algorithm.kl.base_url`): each scores its tasks' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from grpocli.algorithm.kl import EVERY_TASK
from grpocli.errors import ServiceGone
from grpocli.models.teacher import teachers_of
from grpocli.progress import Progress, unreported
from grpocli.training.micro_batch import MicroBatch
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

    def begin(self, rows: Sequence[Row]) -> None:
        """Send this process's rows of the step to the servers, all at once."""
        asks = self.shared_with is None or self.shared_with.is_first
        self.scoring = [teacher.begin(rows_of(teacher.tasks, rows)) for teacher in self.served if asks]

    def score(self, rows: Sequence[Row], batch: MicroBatch, sampling: Sampling) -> None:
        """Set `ref_logp` of the rows of loaded teachers.

        Collective if weights are sharded: a process without rows for a teacher then scores an empty one.
        """
        for teacher in self.loaded:
            own = rows_of(teacher.tasks, rows)
            if len(own) == len(rows):
                teacher.score(rows, batch, sampling)
            elif own or not teacher.parallel.replicated:
                scored = own or [Row.empty()]
                part = MicroBatch.build(scored, batch.mask.device, type(batch.layout))
                teacher.score(scored, part, sampling)

    def finish(self, rows: Sequence[Row], world: World, progress: Progress = unreported) -> None:
        """Wait for the servers, and set `ref_logp` of their rows. Collective.

        Raises ServiceGone, in every process, if a server cannot be reached or misses its deadline, and RunError if it
        refuses a request. No weight has changed then.
        """
        if self.served:
            world.enter("teacher")
            problems = [problem for one in self.scoring if (problem := one.wait(progress))]
            self.scoring = []
            everyones = world.gather_objects(problems)
            for problem in sorted(everyones, key=lambda one: isinstance(one, ServiceGone)):
                raise problem
            self._share(rows)
        for row in rows:
            if row.ref_logp is None:  # an empty row, which no teacher scores
                row.ref_logp = torch.zeros(len(row.completion_ids))

    def _share(self, rows: Sequence[Row]) -> None:
        """Give the servers' log-probs to the processes with the same rows. Collective."""
        scored = [row for teacher in self.served for row in rows_of(teacher.tasks, rows)]
        if self.shared_with and scored:
            received = self.shared_with.from_first([row.ref_logp for row in scored])
            for row, logp_T in zip(scored, received, strict=True):
                row.ref_logp = logp_T

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


def rows_of(tasks: Sequence[str], rows: Sequence[Row]) -> Sequence[Row]:
    """The rows that a teacher of these tasks scores."""
    return rows if EVERY_TASK in tasks else [row for row in rows if row.task in tasks]
