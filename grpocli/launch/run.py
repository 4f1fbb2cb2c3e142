"""A run: prepares the folder and the model, starts the engine, trains, and stops everything."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from grpocli.composition.checks import check_devices, check_model
from grpocli.composition.compose import save, write_record
from grpocli.composition.resume import changes
from grpocli.config.environment import mode_of, without_environment
from grpocli.config.user_code import choice_of
from grpocli.environments.environment import environment_of
from grpocli.errors import ConfigError, GrpoError, Stopped
from grpocli.files import write_atomic
from grpocli.hardware import Devices, devices_of, node_of, visible_gpus
from grpocli.hub import PUSH_KEY
from grpocli.launch.inputs import MODEL, changed_inputs, check_fits, inputs_of
from grpocli.launch.overview import opening_lines, plan_lines
from grpocli.launch.trainer_launcher import SETTLE, TrainerJob, clean, resume_marker, stop_file, wait_for_job
from grpocli.launch.trainer_process import TrainerProcess, as_grpo_error
from grpocli.processes.node import Node
from grpocli.processes.signals import enable_crash_tracebacks, stop_signal
from grpocli.processes.threads import run_in_thread
from grpocli.publish.push import push_finished, refuse_other_run
from grpocli.rewards.python import PythonReward
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.sync_config import locate_servers
from grpocli.rollout.transformers_engine import AutoEngine
from grpocli.rollout.vllm.server_files import new_engine_folder, shared_weights_folder
from grpocli.runs.metrics import read_metrics
from grpocli.runs.run_dir import RunDir, resume_word
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import Changes, Session, add_session, format_value
from grpocli.tasks.task import columns_of, errors_below, key_of
from grpocli.tracking.callbacks import check_callback

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpocli.config.schema import Run
    from grpocli.tasks.prompt_source import PromptSource
    from grpocli.tasks.task import Example, Task
    from grpocli.training.checkpoint import ResumePoint, State
    from grpocli.views.view import View

logger = logging.getLogger(__name__)

READY_WITHIN = 3600.0
"""Seconds that other machines wait for the first one to fetch the model and to start its engine."""
LOADED_WITHIN = 2.0
"""Seconds that the end of a failed start waits for the thread that loads data and models."""
LOCK_WITHIN = 120.0
"""Seconds until a file system releases the lock of a machine that died."""


def launch(config: DictConfig, run: Run, folder: Path, resuming: bool = False) -> float | None:
    """Train `run`, which was built from `config` and checked, in a job of Hydra's. Returns the final accuracy.

    On several machines each calls this; the first one prepares and the others wait for it.
    Raises ConfigError, RunError or Stopped, after everything that was started has been stopped.
    """
    enable_crash_tracebacks()
    run_dir, node = RunDir(folder, "resume") if resuming else RunDir(folder), node_of(run.hardware)
    if node and node.rank:
        return train_on_other_machine(run, run_dir, node)
    new = not resuming and run_dir.is_fresh()
    with run_dir.locked(timeout=LOCK_WITHIN if node else 0.0), run_errors(run_dir, new):
        return _train_locked(config, run, run_dir, resuming, node)


@contextmanager
def run_errors(run_dir: RunDir, new: bool) -> Iterator[None]:
    """A block that raises its errors as GrpoError, and removes the folder of a `new` run that did not begin."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt) as error:
        explained = any((run_dir.path / "logs").glob("vllm*.log"))  # by a server
        if new and not explained:
            with suppress(OSError):
                run_dir.remove_unstarted()
        if isinstance(error, KeyboardInterrupt) and run_dir.config.exists():
            how = f"{resume_word(run_dir.path)} continues from the last checkpoint"
            raise KeyboardInterrupt(f"interrupted; {how}") from error
        raise
    except Stopped:
        try:
            resume_marker(run_dir.path).touch()
        except OSError as error:
            raise run_dir.run_error(error) from error
        raise
    except GrpoError:
        raise
    except Exception as error:
        logger.exception("the run failed")
        raise as_grpo_error(error, run_dir) from error


def _train_locked(config: DictConfig, run: Run, run_dir: RunDir, resuming: bool, node: Node | None) -> float | None:
    """The stages of a run, in a folder that this process has locked."""
    from grpocli.training.checkpoint import ResumePoint, State, load_state, resume_point
    from grpocli.views.live_view import make_view

    view = make_view()
    try:
        run_dir.check_writable(resuming=resuming)
        run_dir.restore()  # after a kill
        if not resuming:
            write_record(run_dir.path, config)
        clean(run_dir.path)
        refuse_other_run(PUSH_KEY, run.hub, run_dir)
        run, devices = _with_choices(config, run, run_dir if resuming else None, view)
        job, point = prepare(run, run_dir, view, devices, node), ResumePoint()
        if resuming:
            view.stage("checking the checkpoint")
            if run_dir.metrics.exists():
                read_metrics(run_dir.metrics)  # finds a damaged line before anything starts
            point = resume_point(run_dir.path, run.resume_fallback, view.progress)
        job = replace(job, checkpoint=point.path)
        state = load_state(point.path) if point.path else State()
        changed, warnings = _record_session(config, run, run_dir, job, point, state, resuming)
        opening = opening_lines(run, job.engine, devices, SavedRun(run_dir.path).choices)
        view.start(run.name or run_dir.name, [*opening, *plan_lines(run, devices)], run.train.steps)
        if resuming:
            _report_resume(run, point, state.step, view, changed)
        for sentence in warnings:
            view.warn(sentence)
        accuracy = _train(run, job, run_dir, view, devices, node)
        push_finished(run.hub, run_dir, view)  # the GPUs are free by now
        return accuracy
    finally:
        view.stop()
        run_dir.restore()


def _report_resume(run: Run, point: ResumePoint, done: int, view: View, changed: Changes) -> None:
    """Report damaged checkpoints or a missing one, and the changed keys. done: steps of the run so far."""
    for sentence in point.fallback:
        logger.warning("%s; continuing from %s", sentence, point.path)
        view.warn(f"{sentence}; continuing from {point.path}")
    if point.path is None:
        view.note("the run ended before its first checkpoint and starts again")
    if done >= run.train.steps:
        view.warn(f"train.steps={run.train.steps}: {done} steps are done, so none is left; raise it to train on")
    for key, (old, new) in changed.items():
        view.note(f"changed {key}: {format_value(old)} -> {format_value(new)}")
    if any(key.startswith(("reward", "algorithm")) for key in changed):
        view.note(f"rewards from now on: {', '.join(run.reward)}")


def _record_session(
    config: DictConfig,
    run: Run,
    run_dir: RunDir,
    job: TrainerJob,
    point: ResumePoint,
    state: State,
    resuming: bool,
) -> tuple[Changes, list[str]]:
    """Write the config and the session. Returns the keys that a resume changes, and sentences about its other inputs.

    Raises ConfigError, with nothing written, if it has another start model.
    """
    from grpocli.models.loading import load_config

    so_far, plain = SavedRun(run_dir.path), without_environment(config)
    before = so_far.config if resuming else plain
    changed = changes(before, plain)
    was, now = (so_far.choices_of(one).get("algorithm") for one in (before, plain))
    if was != now:
        changed = {"algorithm": (was, now)} | changed
    model_path = job.engine.model_path
    commit = None if Path(model_path).is_dir() else load_config(run.model, model_path)._commit_hash
    inputs, before_inputs = inputs_of(plain, model_path, commit), so_far.inputs
    if point.path and inputs.get(MODEL) != before_inputs.get(MODEL):
        check_fits(run.model, model_path, point.path)
    other = changed_inputs(before_inputs, inputs, changed, run.resume_other_weights or not point.path)
    name = so_far.id or state.run or secrets.token_hex(8)
    if resuming:
        run_dir.keep_before()
    # written before the config, so that no change is lost
    add_session(run_dir, replace(Session.now(state.step, changed, [*point.fallback, *other], name), inputs=inputs))
    text = save(config)
    write_atomic(run_dir.config, text, mode_of(text))
    return changed, other


def _with_choices(config: DictConfig, run: Run, resumed: RunDir | None, view: View) -> tuple[Run, Devices]:
    """The run with what its keys leave open, and its devices. The config keeps what a resume elsewhere needs."""
    epochs = run.train.data_epochs
    if epochs is not None and not (resumed and SavedRun(resumed.path).flat.get("train.data_epochs") == epochs):
        config.train.steps = steps_of(epochs, run)  # a resume keeps them unless it changes the epochs
        run = replace(run, train=replace(run.train, steps=config.train.steps))
    if isinstance(run.engine, AutoEngine):
        run = replace(run, engine=run.engine.for_run(run, view.note))
        run.engine.check_run(run)
    devices = devices_of(run.hardware, run.engine.resolved())
    config.eval.problems = run.eval.n_problems(cpu=not devices.train)  # also on a resume on another device
    for spec in run.callbacks:
        check_callback(spec)
    if run.model.lora.path:  # the folder may be gone when the run is resumed or evaluated
        OmegaConf.update(config, "model.lora", asdict(run.model.lora))
    return replace(run, eval=replace(run.eval, problems=config.eval.problems)), devices


def steps_of(epochs: float, run: Run) -> int:
    """The steps that draw the training examples so many times; of several tasks, those of the slowest."""
    tasks = run.tasks
    whole = sum(getattr(task, "weight", 1.0) for task in tasks.values())
    draws = 0.0
    for name, task in tasks.items():
        with errors_below(key_of(run.task, name)):
            draws = max(draws, len(task.examples("train")) * whole / getattr(task, "weight", 1.0))
    return max(1, math.ceil(round(epochs * draws / run.rollout.prompts_per_step, 6)))


def prepare(
    run: Run, run_dir: RunDir, view: View, devices: Devices, node: Node | None = None, split: str = "train"
) -> TrainerJob:
    """Check the run, load the examples of `split` and fetch the model's files. Raises ConfigError."""
    import torch

    from grpocli.models.loading import choose_dtype, choose_head_dtype

    if run.hardware.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU", key="hardware.device", value="cuda", hint="choose cpu or auto")
    check_devices(run, run.engine.resolved(), devices.processes * (node.count if node else 1))
    for name, task in run.tasks.items():
        with errors_below(key_of(run.task, name)):
            _check_functions(run, name, task, task.examples(split)[0])
    model_path = run.model.prepare(lambda fraction, text: view.stage(text, fraction))
    check_model(run, model_path, view)
    dtype = choose_dtype(run.model.dtype, run.model, model_path, run.hardware.device)
    nodes = run.hardware.rollout_nodes
    transport = run.sync.choose(locate_servers(run.hardware.device, run.engine.urls, devices.shared, nodes))
    by_files = transport == "shm" or run.model.lora.rank > 0  # adapters are always files
    engine = EngineJob(
        model_path=model_path,
        dtype=dtype,
        head_dtype=choose_head_dtype(run.model, dtype),
        max_tokens=run.rollout.longest_row,
        run_dir=run_dir.path,
        seed=run.seed,
        transport=transport,
        sync_folder=run.sync.folder or (str(shared_weights_folder(run_dir.path)) if nodes and by_files else None),
        lora_rank=run.model.lora.rank,
        quantized=run.engine.quantizes,
        revision=getattr(run.model, "revision", None),
        trust_remote_code=getattr(run.model, "trust_remote_code", False),
        max_num_seqs=max(run.rollout.group_size, run.eval.samples),
        gpus=devices.rollout,
        shares_gpus=devices.shared is not False,
        nodes=nodes,
        **_vllm_fields(run, model_path, dtype, view, training=split == "train"),
    )
    return TrainerJob(engine, None, node.session if node else "")


def _vllm_fields(run: Run, model_path: str, dtype: str, view: View, training: bool) -> dict[str, Any]:
    """The fields of the engine's job that vLLM needs: the class and the folder of the model, and whether it is dummy.

    A training's own servers need no real weights, because every sync sends all that they read. It sends no buffers,
    such as the expert biases of GLM-4.5.
    """
    from grpocli.models.loading import language_model_class, model_without_weights
    from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate

    engine, fields = run.engine.resolved(), dict[str, Any]()
    if isinstance(engine, Vllm | VllmColocate):
        fields["architecture"] = language_model_class(run.model, model_path)
    if not isinstance(engine, Vllm) or engine.base_url:
        return fields
    if getattr(run.model, "quantization", None):
        from grpocli.training.dequantized import dequantized_base

        view.stage("writing the weights that 4 bits stand for, which vLLM serves")
        fields["served_path"] = dequantized_base(run.model, model_path, dtype, run.hardware.device)
    given = engine.option("load_format") or engine.option("speculative_config")
    if training and not (run.model.lora.rank or engine.quantizes or given):
        model = model_without_weights(run.model, model_path)
        fields["dummy"] = not model.state_dict().keys() & dict(model.named_buffers()).keys()
    return fields


def _check_functions(run: Run, name: str, task: Task, example: Example) -> None:
    """Check the user's functions before the model is fetched. Rewards that load models are checked later."""
    from grpocli.rollout.multi_turn import check_environment
    from grpocli.tasks.prompt_source import rewards_for

    for scorer in rewards_for(task, run.reward):
        if isinstance(run.reward[scorer], PythonReward):
            run.reward[scorer].check(columns_of(example))
    if environment := environment_of(task):
        check_environment(name, environment, example)


def _train(run: Run, job: TrainerJob, run_dir: RunDir, view: View, devices: Devices, node: Node | None) -> float | None:
    with stop_signal() as stop, ExitStack() as running:
        stop.file = stop_file(run_dir.path)
        first_gpu = not devices.train or devices.train[0] == visible_gpus()[0]  # which is torch's in this process
        here = node is None and devices.processes == 1 and first_gpu
        loading = run_in_thread(partial(_load, run, job), "loading") if here else None
        if loading:
            running.callback(wait, [loading], LOADED_WITHIN)  # the next run of a sweep should not begin beside it
        with stop.immediately():
            if node:
                new_engine_folder(run_dir.path)
                replace(job, ready=False).save(run_dir.path)
            running.enter_context(_launched(run, job.engine, view, loading))
            if loading and run.engine.resolved().server_gpus:
                view.stage("loading the model")
                loading.result()  # before others may load models: transformers changes the whole process meanwhile
        if loading:
            return TrainerProcess(run, job, run_dir, stop, view, load=loading.result).train()
        from grpocli.launch.trainer_launcher import train_in_processes

        job.save(run_dir.path)
        for reward in run.reward.values():
            reward.close()  # its worker process, which the trainer processes have, too
        view.stop(f"starting {devices.processes} trainer processes")  # the first of them uses the terminal from now on
        return train_in_processes(run, run_dir, stop, devices, node)


@contextmanager
def _launched(run: Run, job: EngineJob, view: View, loading: Future[Any] | None) -> Iterator[None]:
    """Launch the engine, shown as a stage with progress; a line names the logs of its servers.

    loading: data and models, whose error ends the start, too.
    """
    began, name, starting = time.monotonic(), choice_of("engine", run.engine.resolved()), True
    view.stage(f"starting engine={name}")

    def progress(done: float, total: float, unit: str, detail: str = "") -> None:
        if starting:  # not for a server that is restarted during training
            if loading and loading.done():
                loading.result()
            view.progress(done, total, unit, detail)

    with run.engine.launch(replace(job, progress=progress)):
        starting = False
        if logs := ", ".join(str(path) for path in sorted((job.run_dir / "logs").glob("vllm*.log"))):
            view.note(f"engine={name} is ready after {time.monotonic() - began:.0f} s; its log: {logs}")
        yield


def _load(run: Run, job: TrainerJob) -> tuple[PromptSource, PreTrainedModel | None]:
    """The prompts and, if servers start meanwhile, the policy on the CPU: vLLM is measuring the memory of GPUs."""
    from grpocli.models.loading import load_policy
    from grpocli.training.build_trainer import load_prompts
    from grpocli.training.checkpoint import restoring

    base = job.engine.model_path
    prompts = load_prompts(run, base)
    if not run.engine.resolved().server_gpus or run.model.quantization:
        return prompts, None
    if job.engine.transport != "shm" and not job.engine.lora_rank:
        from grpocli.rollout.vllm.transports import import_engines

        import_engines()
    with restoring(job.checkpoint):
        return prompts, load_policy(run.model, base, str(job.checkpoint or base), run.seed, job.engine.dtype)


def train_on_other_machine(run: Run, run_dir: RunDir, node: Node) -> float | None:
    """Run this machine's trainer processes once the first machine has started the engine.

    A stop is not an error here: SLURM would kill the first machine for it (`srun --kill-on-bad-exit`), perhaps before
    it has asked for a resume.
    """
    from grpocli.launch.trainer_launcher import train_in_processes

    devices = devices_of(run.hardware, run.engine.resolved())
    with stop_signal() as stop:
        with stop.immediately():
            wait_for_job(run_dir.path, node.session, READY_WITHIN)
        try:
            return train_in_processes(run, run_dir, stop, devices, node)
        except Stopped:
            resume_marker(run_dir.path).touch()
            return None
        except GrpoError:
            time.sleep(SETTLE)  # SLURM kills the first machine, which writes the summary, when this one fails
            raise
