"""Several trainer processes on this machine, started by accelerate's launcher."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError, GrpoError, RunError, Stopped
from grpocli.launch.guard import guarded
from grpocli.tracking.files import write_atomic
from grpocli.tracking.metrics import read
from grpocli.tracking.summary import write_summary

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.launch.signals import StopSignal
    from grpocli.tracking.run_dir import RunDir

STOP_FILE = "stop"
"""Its existence in the run's folder asks every process to stop after its step: signals do not reach them all."""


def train_in_processes(run: Run, run_dir: RunDir, stop: StopSignal) -> float | None:
    """Start `hardware.processes` workers and wait for them. Returns the final accuracy.

    Raises the error of the first worker that failed.
    """
    clean(run_dir.path)
    with guarded(command(run, run_dir.path), name="trainers", env=environment(run)) as workers:
        while workers.poll() is None:
            if stop.received:
                (run_dir.path / STOP_FILE).touch()
            time.sleep(0.1)
    failure = first_failure(run_dir.path)
    if workers.returncode == 0 and failure is None:
        accuracy = json.loads(run_dir.summary.read_text()).get("eval/accuracy")
        return None if accuracy is None else float(accuracy)
    error = failure or RunError(
        f"a trainer process ended with code {workers.returncode} without a word; "
        f"see {run_dir.path / 'logs'} and the kernel's log (out of memory?)"
    )
    if not isinstance(error, Stopped):
        _summarise(run_dir, str(error))
    raise error


def _summarise(run_dir: RunDir, cause: str) -> None:
    """Write the summary of a run whose first process could not: it was ended because another one failed."""
    rows = read(run_dir.metrics) if run_dir.metrics.exists() else []
    last = rows[-1] if rows else {}
    seconds = sum(row.get("time/step") or 0.0 for row in rows)
    write_summary(
        run_dir.summary, steps=last.get("step", 0), seconds=seconds, before={}, after={}, metrics=last, cause=cause
    )


def command(run: Run, run_dir: Path) -> list[str]:
    """accelerate's launcher, with a config file of its own so that the user's default one changes nothing."""
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",  # also on the CPU: accelerate's CPU launcher starts one process, silently
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": run.hardware.processes or 1,
        "main_process_port": 0,
        "rdzv_backend": "static",
        "mixed_precision": "no",
    }
    path = run_dir / "accelerate.json"
    write_atomic(path, json.dumps(settings, indent=2))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    return [*launcher, "--module", "grpocli.training.worker", str(run_dir)]


def environment(run: Run) -> dict[str, str]:
    """Ours, with the cores shared out."""
    threads = max(1, len(os.sched_getaffinity(0)) // (run.hardware.processes or 1))
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "ACCELERATE_LOG_LEVEL": "ERROR"}


def failure_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"failure_{rank}.json"


def clean(run_dir: Path) -> None:
    """Forget what earlier sessions of this run left for us."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)
    for path in (run_dir / "logs").glob("failure_*.json"):
        path.unlink()


def report_failure(run_dir: Path, rank: int, error: GrpoError) -> None:
    """Leave an error for the launching process: exit codes and messages do not pass accelerate's launcher."""
    (run_dir / "logs").mkdir(exist_ok=True)
    said = {"time": time.time(), "rank": rank, "code": error.exit_code, "message": str(error)}
    write_atomic(failure_file(run_dir, rank), json.dumps(said))


def first_failure(run_dir: Path) -> GrpoError | None:
    """The error of the process that failed first."""
    said = [json.loads(path.read_text()) for path in (run_dir / "logs").glob("failure_*.json")]
    if not said:
        return None
    first = min(said, key=lambda s: s["time"])
    kind = {2: ConfigError, 3: Stopped}.get(first["code"], RunError)
    return kind(first["message"])
