"""A trainer process: the only one, in the process that the user started, or one of several."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import GrpoError, Stopped
from grpocli.launch.job import Job
from grpocli.tracking.files import write_atomic
from grpocli.tracking.run_dir import RunDir

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.launch.signals import StopSignal
    from grpocli.tracking.recorder import Recorder
    from grpocli.tracking.view import View
    from grpocli.training.trainer import Trainer

logger = logging.getLogger(__name__)


def work(run: Run, job: Job, run_dir: RunDir, stop: StopSignal, view: View) -> float | None:
    """Train; leave `summary.json` whatever happens, and `model/` at the end. Returns the final accuracy."""
    from grpocli.training.assemble import assemble, close
    from grpocli.training.step import train
    from grpocli.training.world import World

    view.stage("loading libraries")
    world = World(run.hardware)
    recorder = make_recorder(run, run_dir, world.is_main, job, view)
    trainer = None
    try:
        view.stage("loading data and model")
        trainer = assemble(run, job.engine, world, recorder, stop, job.checkpoint)
        results = train(trainer)
        summarise(trainer, "done", results)
        save_model(trainer, job, results)
        return results.get("eval/accuracy")
    except Stopped as error:
        summarise(trainer, str(error), {})
        raise
    except BaseException as error:
        summarise(trainer, f"{type(error).__name__}: {error}", {})
        raise
    finally:
        if trainer:
            close(trainer.engine, trainer.collector.sampler.scorer)
        recorder.close()
        world.close()
