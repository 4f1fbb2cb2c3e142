"""The weights of a run before a step: loaded from a checkpoint or the initial model, and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpocli.errors import GrpoError
from grpocli.models.loading import load_policy
from grpocli.training import checkpoint
from grpocli.training.build import choose_layout, load_updater
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.resume_point import UNREADABLE, checkpoints

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.progress import Progress
    from grpocli.rollout.engine import EngineJob
    from grpocli.training.update import Updater
    from grpocli.types import Row


@dataclass(slots=True)
class Weights:
    """The policy, reference and optimizer after `step` steps. origin: where they come from, a phrase."""

    run: Run
    job: EngineJob
    world: World
    updater: Updater
    step: int
    origin: str

    @classmethod
    def load(cls, run: Run, job: EngineJob, world: World, path: Path | None, progress: Progress) -> Weights:
        """The weights of a checkpoint, or of the initial model. Raises GrpoError or OSError."""
        try:
            state = checkpoint.load_state(path) if path else checkpoint.State()
            updater = load_updater(run, job, world, path, state.updates, progress)
        except UNREADABLE as error:
            if isinstance(error, GrpoError):
                raise
            raise GrpoError(f"{path or job.model_path} cannot be read: {' '.join(str(error).split())[:200]}") from error
        for _ in choose_layout(run, world, updater.policy, updater.reference):
            pass
        origin = f"the checkpoint of step {state.step}" if path else "the initial model"
        return cls(run, job, world, updater, state.step, origin)

    @property
    def dtype(self) -> str:
        return self.job.dtype

    def train(self, rows: Sequence[Row], n_groups: int) -> dict[str, float]:
        """Make the updates of the next step; return its metrics. The rows get log-probs and entropies."""
        self.step += 1
        metrics = self.updater.train_step(rows, n_groups, self.step)
        self.updater.move_reference(self.step)
        return metrics

    def score(self, rows: Sequence[Row], progress: Progress) -> list[Tensor]:
        """The log-probs of the rows' tokens under these weights."""
        policy, sampling = self.updater.policy, self.run.rollout.sampling
        layout = policy.layout(sampling)
        place = {id(row): i for i, row in enumerate(rows)}
        found: dict[int, Tensor] = {}
        micro_batches = layout.pack(list(rows), self.run.train.micro_batch_tokens) if rows else []
        for i, batch_rows in enumerate(micro_batches):
            progress(i, len(micro_batches), "micro-batches", "log-probs of the sampler")
            batch = MicroBatch.build(batch_rows, self.world.device, layout)
            logp_BT, _ = policy.logp_without_gradient(batch, sampling)
            for row, logp_T in zip(batch_rows, logp_BT, strict=True):
                found[place[id(row)]] = logp_T[: len(row.completion_ids)].float().cpu()
        return [found[i] for i in range(len(rows))]

    def vocabulary(self) -> int:
        """The number of tokens that the model has."""
        return int(self.updater.policy.model.get_input_embeddings().weight.shape[0])

    def differences_from(self, path: Path) -> Mapping[str, float]:
        """The largest difference of each trained weight from a checkpoint's."""
        saved = load_policy(self.run.model, self.job.model_path, str(path), self.run.seed)
        theirs = dict(saved.named_parameters())
        return {
            name: float((mine.detach().cpu() - theirs[name].detach()).abs().max()) if mine.numel() else 0.0
            for name, mine in _trained(self.updater.policy.model)
        }


def _trained(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def checkpoint_before(run: Path, step: int) -> Path | None:
    """The newest checkpoint of at most this many steps; None if there is none."""
    found = [path for path in checkpoints(run / "checkpoints") if step_of(path) <= step]
    return found[-1] if found else None


def checkpoint_of(run: Path, step: int) -> Path | None:
    """The checkpoint after a step; None if there is none."""
    return next((path for path in checkpoints(run / "checkpoints") if step_of(path) == step), None)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
