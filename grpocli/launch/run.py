"""A run from its config to its summary: prepare, start the engine, train, stop everything."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from grpocli.config.checks import check_installed, check_nodes, check_overlap, check_shares
from grpocli.config.compose import build_run, save
from grpocli.config.plan import plan_lines
from grpocli.errors import ConfigError, GrpoError, Stopped
from grpocli.launch.devices import Devices, devices_of, visible_gpus
from grpocli.launch.job import Job, wait_for_job
from grpocli.launch.meanwhile import Meanwhile
from grpocli.launch.nodes import Node, node_of
from grpocli.launch.processes import SETTLE, again_file, clean, stop_file
from grpocli.launch.signals import crash_loudly, stop_signal
from grpocli.rollout.auto import chosen
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.sync import placement
from grpocli.rollout.vllm.nodes import new_folder, weights_of
from grpocli.tasks.mixture import about, key_of, tasks_of
from grpocli.tracking.files import write_atomic
from grpocli.tracking.run_dir import RunDir

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.tasks.data import Data
    from grpocli.tracking.view import View

logger = logging.getLogger(__name__)

READY_WITHIN = 3600.0
"""Seconds in which the first machine has fetched the model and its engine answers."""
LOCK_WITHIN = 120.0
"""Seconds in which the lock of a machine that has died is surely free."""


def launch(config: DictConfig, folder: Path, resuming: bool = False) -> float | None:
    """Run `config` in `folder`. Returns the final `eval/accuracy`, which sweepers may optimise.

    On several machines each calls this; the first one prepares and the others follow it.
    Raises ConfigError, RunError or Stopped; whatever was started is stopped first.
    """
    crash_loudly()
    run = build_run(config)
    node = node_of(run.hardware)
    run_dir = RunDir(folder)
    if node and node.rank:
        return follow(run, run_dir, node)
    ours = not resuming and run_dir.is_fresh()
    with run_dir.locked(patience=LOCK_WITHIN if node else 0.0):
        return _locked(config, run, run_dir, resuming, ours, node)


def _locked(
    config: DictConfig, run: Run, run_dir: RunDir, resuming: bool, ours: bool, node: Node | None
) -> float | None:
    from grpocli.tracking.view import make_view
    from grpocli.training.worker import explained

    run_dir.check_writable(resuming=resuming)
    clean(run_dir.path)
    view = make_view()
    quiet_libraries()
    try:
        devices = devices_of(run.hardware, chosen(run.engine))
        job = prepare(run, run_dir, view, resuming, devices, node)
        write_atomic(run_dir.config, save(config))
        view.start(run_dir.name, plan_lines(run, devices), run.train.steps)
        return _train(run, job, run_dir, view, devices, node)
    except (ConfigError, KeyboardInterrupt):
        if ours:
            run_dir.forget()
        raise
    except Stopped:
        again_file(run_dir.path).touch()
        raise
    except GrpoError:
        raise
    except Exception as error:
        logger.exception("the run failed")
        raise explained(error, run_dir) from error
    finally:
        view.stop()


def prepare(run: Run, run_dir: RunDir, view: View, resuming: bool, devices: Devices, node: Node | None = None) -> Job:
    """Make ready what needs no model in memory, and find out early what cannot work."""
    from grpocli.training.checkpoint import resume_point
    from grpocli.training.dtype import choose_dtype

    run.tracker.check()
    _check_device(run)
    check_installed(run)
    check_overlap(run, chosen(run.engine))
    check_nodes(run, chosen(run.engine))
    check_shares(run, devices.processes * (node.count if node else 1))
    for name, task in tasks_of(run.task).items():
        with about(key_of(run.task, name)):
            task.examples("train")
    model_path = run.model.prepare(lambda fraction, text: view.stage(text, fraction))
    nodes = getattr(run.hardware, "rollout_nodes", 0)
    transport = run.sync.choose(placement(run.hardware.device, run.engine, devices.shared, nodes))
    shared_folder = str(weights_of(run_dir.path)) if nodes and transport == "shm" else None
    engine = EngineJob(
        model_path=model_path,
        dtype=choose_dtype(run.model.dtype, run.model, model_path, run.hardware.device),
        max_tokens=run.rollout.longest_row,
        run_dir=run_dir.path,
        seed=run.seed,
        transport=transport,
        sync_folder=run.sync.folder or shared_folder,
        lora_rank=run.model.lora.rank,
        revision=getattr(run.model, "revision", None),
        trust_remote_code=getattr(run.model, "trust_remote_code", False),
        most=max(run.rollout.group_size, run.eval.samples),
        gpus=devices.rollout,
        nodes=nodes,
    )
    return Job(engine, resume_point(run_dir.path) if resuming else None, node.session if node else "")


def _check_device(run: Run) -> None:
    import torch

    if run.hardware.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("hardware.device", "cuda", "torch finds no GPU here; take cpu or auto")


def _train(run: Run, job: Job, run_dir: RunDir, view: View, devices: Devices, node: Node | None) -> float | None:
    with stop_signal() as stop, ExitStack() as engine:
        stop.file = stop_file(run_dir.path)
        view.stage("starting the engine")
        here = _in_this_process(devices, node)
        data = engine.enter_context(Meanwhile(partial(_load_data, run, job))) if here else None
        with stop.at_once():
            if node:
                new_folder(run_dir.path)
                replace(job, ready=False).save(run_dir.path)
            engine.enter_context(run.engine.launch(job.engine))
        if data:
            from grpocli.training.worker import work

            return work(run, job, run_dir, stop, view, data=data.result)
        from grpocli.launch.processes import train_in_processes

        job.save(run_dir.path)
        view.stop()  # the first trainer process has the terminal from here
        return train_in_processes(run, run_dir, stop, devices, node)


def _load_data(run: Run, job: Job) -> Data:
    from grpocli.models.loading import load_tokenizer
    from grpocli.tasks.data import Data

    return Data.of(run, load_tokenizer(run.model, job.engine.model_path))


def _in_this_process(devices: Devices, node: Node | None) -> bool:
    """One trainer process, and torch's first GPU is its own."""
    return node is None and devices.processes == 1 and (not devices.train or devices.train[0] == visible_gpus()[0])


def follow(run: Run, run_dir: RunDir, node: Node) -> float | None:
    """A training machine that is not the first: wait until that one is ready, then run the processes of this one.

    To have been stopped is no failure here: SLURM would kill the first machine for it (`srun --kill-on-bad-exit`),
    perhaps before that one has said that the run wants to go on.
    """
    from grpocli.launch.processes import train_in_processes

    quiet_libraries()
    devices = devices_of(run.hardware, chosen(run.engine))
    with stop_signal() as stop:
        with stop.at_once():
            wait_for_job(run_dir.path, node.session, READY_WITHIN)
        try:
            return train_in_processes(run, run_dir, stop, devices, node)
        except Stopped:
            again_file(run_dir.path).touch()
            return None
        except GrpoError:
            time.sleep(SETTLE)  # the first machine, which writes the summary, is killed for it
            raise


def quiet_libraries() -> None:
    """Progress bars and advice of the libraries underneath would tear the live view; their warnings stay in the log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
