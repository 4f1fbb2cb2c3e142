"""The weights of a run before a step: loaded from a checkpoint or the initial model, and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpocli.algorithm.kl import has_teacher, teachers_in
from grpocli.errors import GrpoError
from grpocli.models.loading import load_policy
from grpocli.runs.run_dir import step_of
from grpocli.training import checkpoint
from grpocli.training.build_trainer import load_reference, load_updater
from grpocli.training.checkpoint import checkpoints, restoring
from grpocli.training.teachers import loaded_teachers
from grpocli.training.trials import choose_layout, find_head, pack

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.progress import Progress
    from grpocli.rollout.engine import EngineJob
    from grpocli.training.policy import Reference
    from grpocli.training.teachers import Teachers
    from grpocli.training.update import Updater
    from grpocli.types import Row


@dataclass(slots=True)
class Weights:
    """The policy, reference and optimizer after `step` steps."""

    run: Run
    job: EngineJob
    world: World
    updater: Updater
    step: int
    origin: str
    """Where they come from, a phrase."""

    @classmethod
    def load(cls, run: Run, job: EngineJob, world: World, path: Path | None, progress: Progress) -> Weights:
        """The weights of a checkpoint, or of the initial model. Raises GrpoError or OSError."""
        state = checkpoint.State()
        with restoring(path):
            state = checkpoint.load_state(path) if path else state
            updater = load_updater(run, job, world, path, state, progress)
        for _ in choose_layout(run, world, updater.policy, updater.reference):
            pass
        origin = f"the checkpoint of step {state.step}" if path else "the initial model"
        return cls(run, job, world, updater, state.step, origin)

    @property
    def dtype(self) -> str:
        return self.job.dtype

    @property
    def adds_alike(self) -> bool:
        """Whether the run added its losses and gradients in the same order, in as many processes."""
        hardware = self.run.hardware
        machine = torch.cuda.device_count() if self.world.device.type == "cuda" else 1
        return (hardware.processes or max(1, machine)) == self.world.size

    def train(self, rows: Sequence[Row], n_groups: int) -> dict[str, float]:
        """Make the updates of the next step; return its metrics. The rows get log-probs and entropies."""
        self.step += 1
        metrics = self.updater.train_step(rows, n_groups, self.step)
        self.updater.move_reference(self.step)
        return metrics

    def reference_for(self, run: Run) -> Reference | Teachers | None:
        """The reference that a run's algorithm needs: the loaded one, its teachers, or the initial model.

        Raises GrpoError if there is neither.
        """
        if not run.algorithm.needs_reference:
            return None
        kl, policy = run.algorithm.kl, self.updater.policy
        if self.updater.reference and teachers_in(kl) == teachers_in(self.run.algorithm.kl):
            return self.updater.reference
        if not self.job.model_path and not has_teacher(kl):
            raise GrpoError("this algorithm's reference is the initial model, which is not available")
        reference = load_reference(run, self.job, policy, None)
        for teacher in loaded_teachers(reference):
            find_head(teacher, self.world)
        if policy.packs:
            pack(policy, reference, self.world, self.run.rollout.longest_row)
        return reference

    def gradient(self, run: Run, rows: Sequence[Row], n_groups: int, step: int) -> tuple[dict[str, float], Tensor]:
        """The metrics of one backward of a run's algorithm over the rows, and the gradient.

        The weights stay as they are. Raises GrpoError if the algorithm needs a reference that is not available.
        """
        updater = replace(
            self.updater,
            algorithm=run.algorithm,
            train=replace(self.run.train, epochs=1, minibatches=1),
            reference=self.reference_for(run),
        )
        for window in updater.begin_step(rows, n_groups, step):
            updater.accumulate(window)
        metrics = updater.metrics(rows)
        parameters = [parameter for _, parameter in _trained(updater.policy.model)]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        scale = updater.policy.parallel.scaler.get_scale()
        gradient = torch.cat([part.detach().flatten().float().cpu() / scale for part in parts])
        updater.optimizer.zero_grad(set_to_none=True)
        loss = metrics.get("loss", 0.0)
        return {"loss": loss, "grad_norm": float(gradient.double().norm())}, gradient

    def differences_from(self, path: Path) -> Mapping[str, float]:
        """The largest difference of each trained weight from a checkpoint's. Raises GrpoError if it is unreadable."""
        with restoring(path):
            saved = load_policy(self.run.model, self.job.model_path, str(path), self.run.seed, self.job.dtype)
            theirs = dict(saved.named_parameters())
            return {
                name: float((mine.detach().cpu() - theirs[name].detach()).abs().max()) if mine.numel() else 0.0
                for name, mine in _trained(self.updater.policy.model)
            }


def _trained(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def checkpoint_before(run: Path, step: int) -> Path | None:
    """The newest checkpoint of at most this many steps; None if there is none."""
    return max((path for path in checkpoints(run / "checkpoints") if step_of(path) <= step), key=step_of, default=None)


def checkpoint_of(run: Path, step: int) -> Path | None:
    """The checkpoint after a step; None if there is none."""
    return next((path for path in checkpoints(run / "checkpoints") if step_of(path) == step), None)
