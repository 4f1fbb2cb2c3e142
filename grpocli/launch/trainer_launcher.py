"""The launching process of several trainer processes: starts them through accelerate, finds the cause of failures."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import GrpoError, RunError, Stopped
from grpocli.files import read_shared, write_atomic
from grpocli.processes.guard import alive, guarded
from grpocli.processes.reports import DONE, Heartbeat, exit_reports, heartbeats, report_failure, root_cause
from grpocli.processes.signals import handle_stops
from grpocli.rollout.engine import EngineJob
from grpocli.runs.metrics import summary_of, write_summary
from grpocli.runs.run_dir import resume_command
from grpocli.runs.saved_run import SavedRun
from grpocli.text import masked

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.hardware import Devices
    from grpocli.processes.guard import Guarded
    from grpocli.processes.node import Node
    from grpocli.processes.signals import StopSignal
    from grpocli.runs.run_dir import RunDir

SETTLE = 5.0
"""Seconds after the first failure in which other processes may still report theirs."""
GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL. Short, since the file `stop`, not SIGTERM, requests a stop after the step."""
JOB = "job.json"
"""The input of trainer processes, in the run's folder, written by the launching process."""
POLL = 0.2
"""Seconds between two looks at the files by which processes communicate."""
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of the launcher or its guard after a kill from outside."""


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """A trainer process's input beside the config."""

    engine: EngineJob
    """How the engine was launched."""
    checkpoint: Path | None
    """Where to resume; None: start from the beginning."""
    session: str = ""
    """`Node.session`, on several machines."""
    ready: bool = True
    """Whether the engine accepts connections."""

    def save(self, run_dir: Path) -> None:
        values = asdict(self)
        del values["engine"]["progress"]  # a callback of this process
        write_atomic(run_dir / JOB, json.dumps(values, indent=2, default=str))

    @classmethod
    def load(cls, run_dir: Path) -> TrainerJob:
        values = json.loads(read_shared(run_dir / JOB))
        engine, at = values["engine"], values["checkpoint"]
        job = EngineJob(**engine | {"run_dir": Path(engine["run_dir"]), "gpus": tuple(engine["gpus"])})
        return cls(job, Path(at) if at else None, values["session"], values["ready"])


def wait_for_job(
    run_dir: Path, session: str, timeout: float, ready: bool = True, give_up: threading.Event | None = None
) -> TrainerJob | None:
    """The job that the first machine of this session writes; None once `give_up` is set.

    Raises RunError if there is none within `timeout` seconds.
    """
    until, give_up = time.monotonic() + timeout, give_up or threading.Event()
    while time.monotonic() < until:
        if (run_dir / JOB).exists():
            job = TrainerJob.load(run_dir)
            if job.session == session and (job.ready or not ready):
                return job
        if give_up.wait(POLL):
            return None
    what = "started its engine" if ready else "written the job's description"
    raise RunError(f"the first training machine has not {what} within {timeout:g} s: {run_dir / JOB}")


def train_in_processes(
    run: Run, run_dir: RunDir, stop: StopSignal, devices: Devices, node: Node | None = None
) -> float | None:
    """Start this machine's trainer processes and wait for them. Returns the final accuracy.

    Raises the error of the first process that failed, wherever it runs.
    """
    words = command(devices.processes, run_dir.path, node)
    with guarded(words, name="trainers", env=environment(devices), grace=GRACE) as trainers:
        _wait(run_dir.path, trainers, stop)
        if node and node.count > 1:
            _wait_for_cause(run_dir.path)
        error = _root_cause(run, run_dir.path)  # while hanging processes are still alive
        if trainers.poll() in KILLED and not exit_reports(run_dir.path):
            remedy = f"resume with: {resume_command(run_dir.path)}"
            error = RunError("the trainer processes were killed from outside", remedy=remedy)
    if error is None and (code := trainers.poll()):
        error = RunError(f"the trainer processes ended with code {code} before they had begun: see {run_dir.path}/logs")
    if error is None:
        accuracy = SavedRun(run_dir.path).summary.get("eval/accuracy")
        return None if accuracy is None else float(accuracy)
    if not isinstance(error, Stopped) and (node is None or node.rank == 0):
        _summarise(run_dir, error)
    raise error


def _wait(run_dir: Path, trainers: Guarded, stop: StopSignal) -> None:
    """Wait until the processes have ended, or until SETTLE seconds after one has failed.

    Raises Stopped for a signal before they have begun: there is no step to finish, and they may be waiting, outside of
    Python, for one that never comes.
    """
    failed_at = None
    while trainers.poll() is None:
        if stop.received:
            stop_file(run_dir).touch()
            if not any(beat.begun for beat in heartbeats(run_dir) if beat.here):
                remedy = f"resume with: {resume_command(run_dir)}"
                raise Stopped(f"{stop.received} before the first step", remedy=remedy)
        if failed_at is None and (any(f.code != Stopped.exit_code for f in exit_reports(run_dir)) or _died(run_dir)):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > SETTLE:
            return
        time.sleep(POLL)


def _wait_for_cause(run_dir: Path) -> None:
    """Wait up to SETTLE seconds for another machine's report if all reports so far are lost connections."""
    until = time.monotonic() + SETTLE
    while (found := exit_reports(run_dir)) and all(one.lost_peer for one in found) and time.monotonic() < until:
        time.sleep(POLL)


def _root_cause(run: Run, run_dir: Path) -> GrpoError | None:
    """The error that made the run fail. It is reported for processes of this machine that died without a report, so
    that other machines know it."""
    reported = {report.rank for report in exit_reports(run_dir)}
    dead = _died(run_dir)
    living = [beat for beat in heartbeats(run_dir) if beat.rank not in reported and beat not in dead]
    error = root_cause(exit_reports(run_dir), dead, living, run.hardware.timeout)
    for beat in dead:
        if error:
            report_failure(run_dir, beat.rank, error)
    return error


def _died(run_dir: Path) -> list[Heartbeat]:
    """Processes of this machine that ended without a report."""
    reported = {report.rank for report in exit_reports(run_dir)}
    beats = [beat for beat in heartbeats(run_dir) if beat.here and beat.rank not in reported]
    return [beat for beat in beats if beat.stage != DONE and not alive(beat.pid)]


def _summarise(run_dir: RunDir, error: GrpoError) -> None:
    """Write the summary of a run whose first process was ended because another one failed."""
    if run_dir.unbegun and run_dir.summary.exists():
        return  # a resume that did no step keeps the summary of the run so far
    rows = SavedRun(run_dir.path).metrics
    last = rows[-1] if rows else {}
    seconds, done = sum(row.get("time/step") or 0.0 for row in rows), last.get("step", 0)
    summary = summary_of(
        steps=done,
        seconds=seconds,
        before={},
        after={},
        metrics=last,
        cause=masked(error.cause),
        remedy=masked(error.remedy),
        kind="failed",
    )
    write_summary(run_dir.summary, summary)


def command(processes: int, run_dir: Path, node: Node | None = None) -> list[str]:
    """The command of accelerate's launcher, with a config file that replaces the user's default one.

    processes: on this machine. On one machine the first process chooses a port; on several the job has one.
    """
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",  # also on the CPU: accelerate's CPU launcher starts one process, silently
        "num_machines": node.count if node else 1,
        "machine_rank": node.rank if node else 0,
        "num_processes": processes * (node.count if node else 1),
        "main_process_ip": node.master if node else None,
        "main_process_port": node.port if node else 0,
        "rdzv_backend": "static",
        "same_network": True,
        "mixed_precision": "no",
    }
    path = run_dir / (f"accelerate_{node.rank}.json" if node else "accelerate.json")
    write_atomic(path, json.dumps({k: v for k, v in settings.items() if v is not None}, indent=2))
    launcher = [sys.executable, "-m", "grpocli.launch.trainer_launcher", "--config_file", str(path)]
    return [*launcher, "--module", "grpocli.launch.trainer_process", str(run_dir)]


def environment(devices: Devices) -> dict[str, str]:
    """This process's environment, with the cores divided among the processes and only the training GPUs visible."""
    threads = max(1, len(os.sched_getaffinity(0)) // devices.processes)
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(devices.train)} if devices.train else {}
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "ACCELERATE_LOG_LEVEL": "ERROR", **gpus}


def clean(run_dir: Path) -> None:
    """Remove the files by which processes of earlier sessions of this run communicated."""
    for path in (stop_file(run_dir), resume_marker(run_dir)):
        path.unlink(missing_ok=True)
    for path in [*(run_dir / "logs").glob("failure_*.json"), *(run_dir / "logs").glob("rank_*.json")]:
        path.unlink()


def stop_file(run_dir: Path) -> Path:
    """A file whose existence makes every process stop after its step, since signals do not reach all of them."""
    return run_dir / "stop"


def resume_marker(run_dir: Path) -> Path:
    """A file that exists if the run stopped after a checkpoint. The batch script then requeues the job to resume it."""
    return run_dir / "again"


def main() -> None:
    """accelerate's launcher: `python -m grpocli.launch.trainer_launcher ARGUMENTS OF accelerate launch`.

    It ignores the signals that a whole job gets (SLURM sends them to every process): only `grpocli train`, its parent,
    decides when the trainer processes end. It logs no failures: exit reports explain them.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    handle_stops(signal.SIG_IGN)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = launch_command_parser().parse_args()
    arguments.log_dir = os.devnull  # otherwise torch leaves an empty log folder in the temporary directory
    arguments.signals_to_handle = "SIGQUIT"  # torch's launcher would stop at the others; accelerate has no flag for it
    try:
        launch_command(arguments)
    except ChildFailedError:
        sys.exit(1)


if __name__ == "__main__":
    main()
