"""Inside a trainer process (the process that the user started, or one of several): builds the trainer and trains."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.user_code import raised, too_little_memory, where
from grpocli.errors import GrpoError, RunError, Stopped, causes
from grpocli.files import FULL, QuietFileHandler
from grpocli.launch.trainer_launcher import TrainerJob
from grpocli.processes.libraries import keep_freed_memory
from grpocli.processes.reports import JOINING, START
from grpocli.runs.metrics import MetricsLog, reserve_space, summary_of, write_summary
from grpocli.runs.run_dir import FORBIDDEN, RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.text import escape_unprintable, masked
from grpocli.tracking.callbacks import RunEnd

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.processes.reports import HeartbeatWriter
    from grpocli.processes.signals import StopSignal
    from grpocli.tasks.prompt_source import PromptSource
    from grpocli.tracking.recorder import Recorder
    from grpocli.training.trainer import Trainer
    from grpocli.views.view import View

logger = logging.getLogger(__name__)

PUSH_AFTER_STOP = 30.0
"""Seconds that a run which is stopped waits for the push of its last checkpoint: schedulers grant little time."""


@dataclass(frozen=True, slots=True)
class TrainerProcess:
    """Builds the trainer, trains, and writes the final model and the summary."""

    run: Run
    job: TrainerJob
    run_dir: RunDir
    stop: StopSignal
    view: View
    report: Callable[[BaseException], None] = lambda error: None
    """Called with an error before the other processes can notice that this one ended."""
    heartbeat: HeartbeatWriter | None = None
    """Where stages are written, with several processes."""
    load: Callable[[], tuple[PromptSource, PreTrainedModel | None]] | None = None
    """Returns the prompts, and the policy's model or None to load it here."""

    def train(self) -> float | None:
        """Train, write `model/` at the end, and `summary.json` in any case. Returns the final accuracy."""
        from grpocli.distributed.world import World

        self.view.stage("loading libraries")
        if self.heartbeat:
            self.view.stage("waiting for the other trainer processes")
            self.heartbeat.enter(JOINING)  # outside Python, so the launching process ends this one on a signal
        world = World(self.run.hardware, self.heartbeat)
        world.barrier()  # connects the processes, which forming a group does not
        world.enter(START)
        if world.device.type == "cpu":
            keep_freed_memory()
        recorder = make_recorder(self.run, self.run_dir, world, self.job, self.view)
        trainer = None
        try:
            trainer = self._trainer(world, recorder)
            config = SavedRun(self.run_dir.path).config
            recorder.callbacks.on_start(self.run_dir.path, config, self.run.train.steps, trainer.state.step)
            results = trainer.train()
            finish(trainer, self.job, results)
            recorder.finish_pushes(self.run.hub.timeout)
            recorder.callbacks.on_end(RunEnd(trainer.state.step, "done", "done", self.run_dir.model))
            return results.get("eval/accuracy")
        except BaseException as error:
            if isinstance(error, SystemExit):
                error = RunError(f"user code ended the process: {raised(error)}")
            self.report(error)
            self._summarise_failure(trainer, recorder, error)
            raise error
        finally:
            close_all(*([trainer.close] if trainer else []), recorder.close, world.close)

    def _trainer(self, world: World, recorder: Recorder) -> Trainer:
        from grpocli.training.build_trainer import build_trainer, load_prompts

        run, job = self.run, self.job
        self.view.stage("loading the data")
        data, model = self.load() if self.load else (load_prompts(run, job.engine.model_path), None)
        self.view.stage("loading the model")
        return build_trainer(run, job.engine, world, recorder, self.stop, job.checkpoint, data, model)

    def _summarise_failure(self, trainer: Trainer | None, recorder: Recorder, error: BaseException) -> None:
        if (trainer is None or self.run_dir.unbegun) and self.run_dir.summary.exists():
            return  # a resume that did no step keeps the summary of the run so far
        known = error if isinstance(error, GrpoError) else GrpoError(raised(error))
        kind = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
        if recorder.metrics is not None:  # in the main process
            cause, remedy = masked(known.cause), masked(known.remedy)
            summary = summary_of_run(trainer, recorder, cause=cause, remedy=remedy, kind=kind, after={})
            with suppress(OSError):  # the error that ends the run is the one to tell
                write_summary(self.run_dir.summary, summary)
        if not isinstance(error, KeyboardInterrupt):  # a second Ctrl-C waits for nothing
            recorder.finish_pushes(PUSH_AFTER_STOP)
            recorder.callbacks.on_end(RunEnd(trainer.state.step if trainer else 0, kind, masked(str(known)), None))


def close_all(*closes: Callable[[], None]) -> None:
    """Call each function, even if others fail. Raises their first error, unless another error is being handled."""
    handled, errors = sys.exception(), []
    for close in closes:
        try:
            close()
        except Exception as error:
            logger.exception("closing failed")
            errors.append(error)
    if errors and handled is None:
        raise errors[0]


def make_recorder(run: Run, run_dir: RunDir, world: World, job: TrainerJob, view: View) -> Recorder:
    """The recorder of the main process with its files, view and tracker; in other processes one with only a view."""
    from grpocli.algorithm.kl import has_teacher
    from grpocli.rewards.reward import answer_columns
    from grpocli.tracking.callbacks import Callbacks, make_callbacks
    from grpocli.tracking.recorder import Recorder
    from grpocli.training.checkpoint import load_state

    if not world.is_main:
        return Recorder(run_dir, view, None, None)
    reserve_space(run_dir.summary)
    log = MetricsLog(run_dir.metrics)
    done = load_state(job.checkpoint).step if job.checkpoint else 0
    view.resumed(done)
    config = SavedRun(run_dir.path).config
    tracker = run.tracker.start(run.name or run_dir.path.name, run_dir.path, config, done)
    recorder = Recorder(
        run_dir,
        view,
        log,
        tracker,
        mismatch_expected=bool(run.rollout.sampling.structure),
        has_teacher=has_teacher(run.algorithm.kl),
        dtype=job.engine.dtype,
        answer_columns=answer_columns(run.reward.values()),
        begin=partial(_begin, run_dir, log, done, view),
    )
    callbacks = make_callbacks(run.callbacks)
    recorder.callbacks = Callbacks(callbacks, show=view.stage, restore=recorder.show_stage, warn=view.warn)
    if run.hub.push and run.hub.checkpoints:
        from grpocli.publish.push import CheckpointPushes, Pusher

        recorder.pushes = CheckpointPushes(Pusher(run_dir, run.hub), view.warn)
    return recorder


def _begin(run_dir: RunDir, log: MetricsLog, done: int, view: View) -> None:
    """Before a resume's first record: remove those after step `done`, which it makes again, and keep its config."""
    from grpocli.training.checkpoint import set_aside_after

    if not run_dir.unbegun:
        return
    if missing := log.truncate_after(done):
        warning = f"{run_dir.metrics} lacks {missing} of the {done} steps done: their metrics are lost"
        logger.warning(warning)
        view.warn(warning)
    run_dir.delete_rollouts_after(done)
    set_aside_after(run_dir.checkpoints, done)
    run_dir.begin()


def finish(trainer: Trainer, job: TrainerJob, results: dict[str, float]) -> None:
    """Write the final model and the summary."""
    import torch

    from grpocli.models.loading import load_config
    from grpocli.publish.published import model_card
    from grpocli.training.checkpoint import save_model

    main, recorder, card = trainer.world.is_main, trainer.recorder, ""
    recorder.begin()  # also without a step
    if main:
        summary = summary_of_run(trainer, recorder, cause="done", kind="done", after=results, early=_early(trainer))
        card = model_card(recorder.run_dir, job.engine.model_path, summary)
    recorder.stage("model")
    dtype = load_config(trainer.run.model, job.engine.model_path).dtype or torch.float32
    progress = recorder.progress_of("model")
    save_model(recorder.run_dir.model, trainer.policy, trainer.tokenizer, dtype, card, trainer.world, progress)
    if main:
        write_summary(recorder.run_dir.summary, summary)  # written last: it marks the run as finished
        recorder.view.note(f"the final model is in {recorder.run_dir.model}")
    trainer.world.barrier()


def _early(trainer: Trainer) -> dict[str, object] | None:
    """What ended a run before its last step, a metric or a callback; None for another run."""
    if trainer.state.step >= trainer.run.train.steps:
        return None
    if callback := trainer.recorder.callbacks.stop:
        return {"callback": callback}
    stop_at = trainer.run.eval.stop_at
    value = stop_at.reached_by(trainer.last_evaluation)
    return None if value is None else {"metric": stop_at.name, "value": value, "threshold": stop_at.threshold}


def summary_of_run(trainer: Trainer | None, recorder: Recorder, **facts: Any) -> dict[str, object]:
    """The content of summary.json. facts: the arguments of `summary_of` that tell how the run ended."""
    return summary_of(
        steps=trainer.state.step if trainer else 0,
        seconds=trainer.seconds if trainer else 0.0,
        before=(trainer.state.before if trainer else None) or {},
        metrics=recorder.last,
        incomparable=SavedRun(recorder.run_dir.path).incomparable,
        **facts,
    ) | {"checkpoint": recorder.saved}


def main() -> None:
    """One of several trainer processes: accelerate runs `python -m grpocli.launch.trainer_process RUN_DIR`."""
    from grpocli.composition.compose import saved_run
    from grpocli.launch.trainer_launcher import stop_file
    from grpocli.processes.libraries import quiet_libraries
    from grpocli.processes.reaper import die_with_parent
    from grpocli.processes.reports import DONE, HeartbeatWriter
    from grpocli.processes.signals import StopSignal, enable_crash_tracebacks, handle_stops
    from grpocli.processes.threads import end_process
    from grpocli.views.live_view import make_view
    from grpocli.views.view import View

    enable_crash_tracebacks()
    die_with_parent()  # as the launcher dies with its guard
    run_dir, rank = RunDir(Path(sys.argv[1])), int(os.environ["RANK"])
    stop = StopSignal(file=stop_file(run_dir.path))
    handle_stops(signal.SIG_IGN)  # the launching process knows which ones count, and makes the file
    heartbeat = HeartbeatWriter(run_dir.path, rank)
    quiet_libraries()
    escape_unprintable()
    try:
        log_to(run_dir, rank)
        run = saved_run(run_dir)
        view = make_view() if rank == 0 else View()
        view.start(run.name or run_dir.name, [], run.train.steps)
        report = partial(_report, run_dir, rank)
        with run_dir.worker_lock():
            TrainerProcess(run, TrainerJob.load(run_dir.path), run_dir, stop, view, report, heartbeat).train()
    except Stopped:
        pass  # reported; with a code the launcher would end the others before they have finished
    except Exception as error:
        logger.exception("process %d failed", rank)
        _report(run_dir, rank, error)
        end_process(as_grpo_error(error, run_dir).exit_code)
    heartbeat.enter(DONE)
    end_process(0)


def _report(run_dir: RunDir, rank: int, error: BaseException) -> None:
    """Leave an exit report for the launching process."""
    from grpocli.processes.reports import is_lost_peer, report_failure

    if isinstance(error, Exception):
        with suppress(OSError):  # the launching process notices that this one has ended
            report_failure(run_dir.path, rank, as_grpo_error(error, run_dir), is_lost_peer(error))


def log_to(run_dir: RunDir, rank: int) -> None:
    """Log to `logs/rank_N.log`, with the output of every process but the first, which has the console and run.log."""
    own = run_dir.path / "logs" / f"rank_{rank}.log"
    own.parent.mkdir(exist_ok=True)
    if rank:
        file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
    handlers = [QuietFileHandler(path) for path in ([own] if rank else [own, run_dir.log])]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{rank}] %(message)s", handlers=handlers)


def as_grpo_error(error: Exception, run_dir: RunDir) -> GrpoError:
    """The error as a GrpoError, shown without its traceback, which is in the log."""
    if isinstance(error, GrpoError):
        return error
    if short := too_little_memory(error):
        return short
    if isinstance(error, OSError):
        return run_dir.run_error(error)
    if where(error):
        return RunError(f"{raised(error)}; the traceback is in {run_dir.log}")
    full_disk = (one for one in causes(error) if isinstance(one, OSError) and one.errno in (*FULL, *FORBIDDEN))
    if below := next(full_disk, None):
        return run_dir.run_error(below)
    cause = " ".join(str(error).split()) or "no message"
    return RunError(f"{type(error).__name__}: {cause[:500]} (traceback in {run_dir.log}; a bug, or a broken part)")


if __name__ == "__main__":
    main()
