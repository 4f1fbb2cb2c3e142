"""The training loop, as the papers write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.errors import ServiceGone
from grpocli.progress import Cancelled
from grpocli.training.trainer import torch_seed

if TYPE_CHECKING:
    from grpocli.training.trainer import Trainer


def train(trainer: Trainer) -> dict[str, float]:
    """Steps until there have been `train.steps`; returns the evaluation afterwards.

    Raises Stopped, after a checkpoint, where a signal asked for it, or the engine or a scoring service is gone.
    """
    try:
        trainer.before()
        trainer.repeat_evaluation()
        trainer.raise_if_stopped()
        while not trainer.done:
            step(trainer)
            trainer.raise_if_stopped()
        return trainer.after()
    except ServiceGone as gone:
        raise trainer.stopped_by(gone) from gone
    except Cancelled:
        raise trainer.stopped() from None


def step(trainer: Trainer) -> None:
    """One step: sync -> collect -> credit -> update -> log -> checkpoint."""
    torch_seed(trainer.run.seed, trainer.state.step, trainer.world.rank)
    trainer.world.enter("start", trainer.state.step + 1)
    trainer.sync()
    collected = trainer.collect()
    rows = trainer.credit(collected)
    trainer.update(rows, len(collected.groups))
    try:
        trainer.evaluate_if_due()
    finally:  # an evaluation that cannot be had takes no step's row with it
        trainer.log(collected, rows)
    if trainer.due(trainer.run.checkpoint.every):
        trainer.checkpoint()
