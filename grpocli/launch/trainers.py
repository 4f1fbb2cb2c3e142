"""The trainer processes of this machine, started by accelerate's launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import GrpoError, RunError, Stopped
from grpocli.files import write_atomic
from grpocli.masking import masked
from grpocli.processes.exit_reports import failures, report_failure, verdict
from grpocli.processes.guard import alive, guarded
from grpocli.processes.heartbeat import DONE, Place, places
from grpocli.tracking.metrics import read, summary_of, write_summary

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.hardware.devices import Devices
    from grpocli.processes.guard import Guarded
    from grpocli.processes.node import Node
    from grpocli.processes.signals import StopSignal
    from grpocli.tracking.run_dir import RunDir

SETTLE = 5.0  # seconds in which the others may still say what they see of a failure
GRACE = 1.0  # seconds between TERM, which trainer processes take as a wish, and KILL
POLL = 0.1
POLL_SHARED = 1.0  # on a file system that all machines of the run ask
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGKILL)  # the launcher itself, or its guard


def train_in_processes(
    run: Run, run_dir: RunDir, stop: StopSignal, devices: Devices, node: Node | None = None
) -> float | None:
    """Start this machine's trainer processes and wait for them. Returns the final accuracy.

    Raises the error of the first process that failed, wherever it runs.
    """
    words = command(devices.processes, run_dir.path, node)
    with guarded(words, name="trainers", env=environment(devices), grace=GRACE) as workers:
        _wait(run_dir.path, workers, stop, POLL_SHARED if node else POLL)
        if node and node.count > 1:
            _hear_the_others(run_dir.path)
        error = _why(run, run_dir.path)  # while those that hang still live
        if workers.returncode in KILLED and not failures(run_dir.path):
            error = RunError(f"the trainer processes were killed from outside; go on with resume={run_dir.path}")
    if error is None and workers.returncode:
        error = RunError(
            f"the trainer processes ended with code {workers.returncode} before they had begun; see {run_dir.path}/logs"
        )
    if error is None:
        accuracy = json.loads(run_dir.summary.read_text()).get("eval/accuracy")
        return None if accuracy is None else float(accuracy)
    if not isinstance(error, Stopped) and (node is None or node.rank == 0):
        _summarise(run_dir, str(error))
    raise error


def _wait(run_dir: Path, workers: Guarded, stop: StopSignal, poll: float) -> None:
    """Until the processes have ended, or one has failed and the others have had time to say so."""
    asked, failed_at = False, None
    while workers.poll() is None:
        if stop.received and not asked:
            stop_file(run_dir).touch()
            asked = True
        if failed_at is None and (any(f.code != Stopped.exit_code for f in failures(run_dir)) or _silent(run_dir)):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > SETTLE:
            return
        time.sleep(poll)


def _hear_the_others(run_dir: Path) -> None:
    """A machine that has only lost its connections waits for the one that knows why."""
    until = time.monotonic() + SETTLE
    while (said := failures(run_dir)) and all(failure.lost for failure in said) and time.monotonic() < until:
        time.sleep(POLL)


def _why(run: Run, run_dir: Path) -> GrpoError | None:
    """The error that began it. What only this machine can see of its own processes is told to the other ones."""
    said = {failure.rank for failure in failures(run_dir)}
    dead = _silent(run_dir)
    living = [place for place in places(run_dir) if place.rank not in said and place not in dead]
    error = verdict(failures(run_dir), dead, living, run.hardware.timeout)
    if error and dead:
        for place in dead:
            report_failure(run_dir, place.rank, error)
    return error


def _silent(run_dir: Path) -> list[Place]:
    """Processes of this machine that are gone and have not said why."""
    said = {failure.rank for failure in failures(run_dir)}
    return [p for p in places(run_dir) if p.here and p.rank not in said and p.stage != DONE and not alive(p.pid)]


def _summarise(run_dir: RunDir, cause: str) -> None:
    """Write the summary of a run whose first process could not: it was ended because another one failed."""
    rows = read(run_dir.metrics) if run_dir.metrics.exists() else []
    last = rows[-1] if rows else {}
    seconds = sum(row.get("time/step") or 0.0 for row in rows)
    summary = summary_of(
        steps=last.get("step", 0), seconds=seconds, before={}, after={}, metrics=last, cause=masked(cause)
    )
    write_summary(run_dir.summary, summary)


def command(processes: int, run_dir: Path, node: Node | None = None) -> list[str]:
    """accelerate's launcher, with a config file of its own so that the user's default one changes nothing.

    processes: on this machine. On one machine a port is chosen when the first process listens; on several it is the
    job's.
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
    launcher = [sys.executable, "-m", "grpocli.launch.accelerated", "--config_file", str(path)]
    return [*launcher, "--module", "grpocli.launch.train_process", str(run_dir)]


def environment(devices: Devices) -> dict[str, str]:
    """Ours, with the cores shared out and the training GPUs alone in sight."""
    threads = max(1, len(os.sched_getaffinity(0)) // devices.processes)
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(devices.train)} if devices.train else {}
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "ACCELERATE_LOG_LEVEL": "ERROR", **gpus}


def clean(run_dir: Path) -> None:
    """Forget what earlier sessions of this run left for us."""
    for path in (stop_file(run_dir), again_file(run_dir)):
        path.unlink(missing_ok=True)
    for path in [*(run_dir / "logs").glob("failure_*.json"), *(run_dir / "logs").glob("place_*.json")]:
        path.unlink()


def stop_file(run_dir: Path) -> Path:
    """Its existence asks every process to stop after its step: signals do not reach them all."""
    return run_dir / "stop"


def again_file(run_dir: Path) -> Path:
    """Its existence says that the run was stopped after a checkpoint, and wants to be resumed."""
    return run_dir / "again"
