"""A run from its config to its summary: prepare, start the engine, train, stop everything."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from grpocli.config.checks import check_overlap
from grpocli.config.compose import build_run, save
from grpocli.config.plan import plan_lines
from grpocli.errors import ConfigError, GrpoError
from grpocli.launch.job import Job
from grpocli.launch.signals import stop_signal
from grpocli.rollout.auto import Auto
from grpocli.rollout.engine import EngineJob
from grpocli.tracking.files import write_atomic
from grpocli.tracking.run_dir import RunDir

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.tracking.view import View

logger = logging.getLogger(__name__)


def launch(config: DictConfig, folder: Path, resuming: bool = False) -> float | None:
    """Run `config` in `folder`. Returns the final `eval/accuracy`, which sweepers may optimise.

    Raises ConfigError, RunError or Stopped; whatever was started is stopped first.
    """
    run = build_run(config)
    run_dir = RunDir(folder)
    ours = not resuming and run_dir.is_fresh()
    with run_dir.locked():
        return _locked(config, run, run_dir, resuming, ours)


def _locked(config: DictConfig, run: Run, run_dir: RunDir, resuming: bool, ours: bool) -> float | None:
    from grpocli.tracking.view import make_view
    from grpocli.training.worker import explained

    run_dir.check_writable(resuming=resuming)
    view = make_view()
    quiet_libraries()
    try:
        job = prepare(run, run_dir, view, resuming)
        write_atomic(run_dir.config, save(config))
        view.start(run_dir.name, plan_lines(run), run.train.steps)
        return _train(config, run, job, run_dir, view)
    except (ConfigError, KeyboardInterrupt):
        if ours:
            run_dir.forget()
        raise
    except GrpoError:
        raise
    except Exception as error:
        logger.exception("the run failed")
        raise explained(error, run_dir) from error
    finally:
        view.stop()


def prepare(run: Run, run_dir: RunDir, view: View, resuming: bool) -> Job:
    """Make ready what needs no model in memory, and find out early what cannot work."""
    from grpocli.training.checkpoint import resume_point
    from grpocli.training.dtype import choose_dtype

    run.tracker.check()
    _check_device(run)
    check_overlap(run, run.engine.chosen() if isinstance(run.engine, Auto) else run.engine)
    run.task.examples("train")
    model_path = run.model.prepare(lambda fraction, text: view.stage(text, fraction))
    engine = EngineJob(
        model_path=model_path,
        dtype=choose_dtype(run.model.dtype, model_path, run.hardware.device),
        max_tokens=run.rollout.max_prompt_tokens + run.rollout.max_completion_tokens,
        run_dir=run_dir.path,
        seed=run.seed,
        transport=run.sync.transport(run.hardware.device, run.engine, run.hardware.processes or 1),
        sync_folder=run.sync.folder,
        lora_rank=run.model.lora.rank,
        revision=getattr(run.model, "revision", None),
        trust_remote_code=getattr(run.model, "trust_remote_code", False),
        most=max(run.rollout.group_size, run.eval.samples),
    )
    return Job(engine, resume_point(run_dir.path) if resuming else None)


def _check_device(run: Run) -> None:
    import torch

    if run.hardware.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("hardware.device", "cuda", "torch finds no GPU here; take cpu or auto")


def _train(config: DictConfig, run: Run, job: Job, run_dir: RunDir, view: View) -> float | None:
    with stop_signal() as stop, ExitStack() as engine:
        view.stage("starting the engine")
        with stop.at_once():
            engine.enter_context(run.engine.launch(job.engine))
        if (run.hardware.processes or 1) == 1:
            from grpocli.training.worker import work

            return work(run, job, run_dir, stop, view)
        from grpocli.launch.processes import train_in_processes

        job.save(run_dir.path)
        view.stop()  # the first trainer process has the terminal from here
        return train_in_processes(run, run_dir, stop)


def quiet_libraries() -> None:
    """Progress bars and advice of the libraries underneath would tear the live view; their warnings stay in the log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
