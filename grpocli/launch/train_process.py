"""A trainer process: the only one, in the process that the user started, or one of several."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import GrpoError, RunError, Stopped
from grpocli.files import FULL, QuietFileHandler
from grpocli.masking import masked
from grpocli.processes.malloc import keep_freed
from grpocli.tracking.run_dir import FORBIDDEN, RunDir
from grpocli.training.trainer_job import TrainerJob
from grpocli.user_frames import raised, where

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.processes.heartbeat import Board
    from grpocli.processes.signals import StopSignal
    from grpocli.tasks.prompt_source import Data
    from grpocli.tracking.recorder import Recorder
    from grpocli.tracking.view import View
    from grpocli.training.trainer import Trainer

logger = logging.getLogger(__name__)


def work(
    run: Run,
    job: TrainerJob,
    run_dir: RunDir,
    stop: StopSignal,
    view: View,
    report: Callable[[BaseException], None] | None = None,
    board: Board | None = None,
    data: Callable[[], Data] | None = None,
) -> float | None:
    """Train; leave `model/` at the end, and `summary.json` whatever happens. Returns the final accuracy.

    report: told of an error before the other processes can notice that this one has gone. board: where this one says
    what it is doing. data: what has been loaded meanwhile.
    """
    from grpocli.distributed.world import World
    from grpocli.models.loading import load_tokenizer
    from grpocli.tasks.prompt_source import Data
    from grpocli.training.build import build_trainer

    view.stage("loading libraries")
    if board:
        board.enter("start")
    world = World(run.hardware, board)
    if world.device.type == "cpu":
        keep_freed()
    recorder = make_recorder(run, run_dir, world, job, view)
    trainer = None
    try:
        view.stage("loading the data")
        loaded = data() if data else Data.of(run, load_tokenizer(run.model, job.engine.model_path))
        view.stage("loading the model")
        trainer = build_trainer(run, job.engine, world, recorder, stop, job.checkpoint, loaded)
        results = trainer.train()
        finish(trainer, job, results)
        return results.get("eval/accuracy")
    except BaseException as error:
        if report:
            report(error)
        cause = str(error) if isinstance(error, GrpoError) else raised(error)
        cause = masked(cause)
        try:
            if trainer or not run_dir.summary.exists():  # a resume that cannot start keeps what the run had reached
                summarise(trainer, recorder, cause)
        except OSError:
            logger.exception("the summary was not written")
        raise
    finally:
        close_all(*([trainer.close] if trainer else []), recorder.close, world.close)


def close_all(*closes: Callable[[], None]) -> None:
    """Call each, even if others fail. Raises the first error unless another is being handled."""
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
    """The files, view and tracker of the main process; nothing but a silent view in the others."""
    from omegaconf import OmegaConf

    from grpocli.rewards.reward import answer_columns
    from grpocli.tracking.metrics import MetricsLog, reserve
    from grpocli.tracking.recorder import Recorder
    from grpocli.training.checkpoint import load_state

    if not world.is_main:
        return Recorder(run_dir, view, None, None)
    reserve(run_dir.summary)
    log = MetricsLog(run_dir.metrics)
    done = load_state(job.checkpoint).step if job.checkpoint else 0
    if missing := log.truncate_after(done):
        warning = f"{run_dir.metrics} has nothing of {missing} of the {done} steps done: what it held is lost"
        logger.warning(warning)
        view.warn(warning)
    run_dir.forget_rollouts_after(done)
    view.resumed(done)
    config = OmegaConf.to_container(OmegaConf.load(run_dir.config))
    tracker = run.tracker.start(run_dir.path.name, run_dir.path, config)
    return Recorder(
        run_dir,
        view,
        log,
        tracker,
        mismatch_expected=bool(run.rollout.sampling.structure),
        dtype=job.engine.dtype,
        answers=answer_columns(run.reward.values()),
    )


def finish(trainer: Trainer, job: TrainerJob, results: dict[str, float]) -> None:
    """The summary and the final model."""
    import torch

    from grpocli.models.loading import load_config
    from grpocli.tracking.card import model_card
    from grpocli.tracking.metrics import write_summary
    from grpocli.training.checkpoint import save_model

    main, recorder, card = trainer.world.is_main, trainer.recorder, ""
    if main:
        summary = summary_content(trainer, recorder, "done", results)
        card = model_card(recorder.run_dir, job.engine.model_path, summary)
    recorder.stage("model")
    dtype = load_config(trainer.run.model, job.engine.model_path).dtype or torch.float32
    progress = recorder.progress_of("model")
    save_model(recorder.run_dir.model, trainer.policy, trainer.tokenizer, dtype, card, trainer.world, progress)
    if main:
        write_summary(recorder.run_dir.summary, summary)  # now the run is finished
        recorder.view.note(f"the final model is in {recorder.run_dir.model}")
    trainer.world.barrier()


def summarise(trainer: Trainer | None, recorder: Recorder, cause: str) -> None:
    """Write summary.json, in the main process."""
    from grpocli.tracking.metrics import write_summary

    if recorder.metrics is not None:
        write_summary(recorder.run_dir.summary, summary_content(trainer, recorder, cause, {}))


def summary_content(
    trainer: Trainer | None, recorder: Recorder, cause: str, results: dict[str, float]
) -> dict[str, object]:
    """The content of summary.json."""
    from grpocli.tracking.metrics import summary_of
    from grpocli.tracking.sessions import why_incomparable

    before = (trainer.state.before if trainer else None) or {}
    return summary_of(
        steps=trainer.state.step if trainer else 0,
        seconds=trainer.seconds if trainer else 0.0,
        before=before,
        after=results,
        metrics=recorder.last,
        cause=cause,
        incomparable=why_incomparable(recorder.run_dir),
    )


def main() -> None:
    """One of several trainer processes: accelerate runs `python -m grpocli.launch.train_process RUN_DIR`."""
    from omegaconf import OmegaConf

    from grpocli.launch.compose import build_run, register_parts
    from grpocli.launch.trainers import stop_file
    from grpocli.processes.exit_reports import is_lost_peer, report_failure
    from grpocli.processes.heartbeat import DONE, Board
    from grpocli.processes.leave import leave_threads
    from grpocli.processes.reaper import die_with_parent
    from grpocli.processes.signals import StopSignal, crash_loudly
    from grpocli.tracking.live_view import make_view
    from grpocli.tracking.text import clean_warnings
    from grpocli.tracking.view import silent_view

    crash_loudly()
    die_with_parent()  # what the guard does for the launcher
    stop = StopSignal()
    stop.listen()
    run_dir = RunDir(Path(sys.argv[1]))
    stop.file = stop_file(run_dir.path)
    rank = int(os.environ["RANK"])
    board = Board(run_dir.path, rank)

    def report(error: BaseException) -> None:
        if isinstance(error, Exception):
            with suppress(OSError):  # the launching process notices that this one is gone
                report_failure(run_dir.path, rank, explained(error, run_dir), is_lost_peer(error))

    quiet_libraries()
    clean_warnings()
    try:
        log_to(run_dir, rank)
        register_parts()
        config = OmegaConf.load(run_dir.config)
        run = build_run(config)  # type: ignore[arg-type]
        view = make_view() if rank == 0 else silent_view()
        view.start(run_dir.name, [], run.train.steps)
        with run_dir.worked_in():
            work(run, TrainerJob.load(run_dir.path), run_dir, stop, view, report, board)
    except Stopped:
        pass  # reported; a code would make the launcher end the others before they have finished
    except Exception as error:
        logger.exception("process %d failed", rank)
        report(error)
        code = explained(error, run_dir).exit_code
        leave_threads(code)
        sys.exit(code)
    board.enter(DONE)
    leave_threads(0)


def log_to(run_dir: RunDir, rank: int) -> None:
    """Each process has a log of its own; the console, and the run's log, belong to the first one."""
    own = run_dir.path / "logs" / f"rank_{rank}.log"
    own.parent.mkdir(exist_ok=True)
    if rank:
        redirect_output(own)
    handlers = [QuietFileHandler(path) for path in ([own] if rank else [own, run_dir.log])]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{rank}] %(message)s", handlers=handlers)


def explained(error: Exception, run_dir: RunDir) -> GrpoError:
    """Any error as one that can be shown without its traceback, which the log has."""
    if isinstance(error, GrpoError):
        return error
    if isinstance(error, OSError):
        return run_dir.trouble(error)
    if where(error):
        return RunError(f"{raised(error)}; the traceback is in {run_dir.log}")
    if below := _disk_trouble(error):
        return run_dir.trouble(below)
    cause = " ".join(str(error).split()) or "no message"
    return RunError(f"{type(error).__name__}: {cause[:500]} (traceback in {run_dir.log}; a bug, or a broken part)")


def _disk_trouble(error: BaseException | None) -> OSError | None:
    """The error of a full disk or an unwritable folder among the causes of another error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (*FULL, *FORBIDDEN):
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def redirect_output(path: Path) -> None:
    """Send this process's output to a file: the console belongs to the first process."""
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def quiet_libraries() -> None:
    """Progress bars and advice of the libraries underneath would tear the live view; their warnings stay in the log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request


if __name__ == "__main__":
    main()
