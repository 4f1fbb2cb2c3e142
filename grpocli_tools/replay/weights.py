"""The weights of a run before a step: loaded from a checkpoint or the initial model, and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpocli.models.loading import load_policy
from grpocli.runs.run_dir import step_of
from grpocli.training import checkpoint
from grpocli.training.build_trainer import load_updater
from grpocli.training.checkpoint import checkpoints, restoring
from grpocli.training.trials import choose_layout

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.progress import Progress
    from grpocli.rollout.engine import EngineJob
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
