"""SLURM commands on the machine that submits, sbatch and squeue, and waiting for submitted jobs.

squeue has the jobs' states and the runs' folders their results; sacct is not needed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from grpocli.errors import ConfigError, RunError
from grpocli.runs.saved_run import SavedRun

TIMEOUT = 60
"""Seconds within which SLURM must answer a command."""


def check() -> None:
    """Raise ConfigError if there is no SLURM. What a cluster lacks, `sbatch` says itself."""
    if shutil.which("sbatch") is None:
        hint = "submit from a machine of the cluster, or only write the script with hydra.launcher.dry_run=true"
        raise ConfigError("there is no sbatch on the path", key="hydra/launcher", value="slurm", hint=hint)


def submit(script: str, partition: str | None) -> str:
    """Submit a batch script and return the job's id. Raises ConfigError with sbatch's own message.

    partition: passed as an option too, because SBATCH_PARTITION overrides the script's.
    """
    more = [] if partition is None else [f"--partition={partition}"]
    return ask("sbatch", "--parsable", *more, script, fault=ConfigError).strip().partition(";")[0]


def states(job: str) -> dict[str, tuple[str, str]]:
    """{array task: (state, nodes or reason)} of a job; a job without an array is task "0".

    Empty if SLURM has forgotten the job.
    """
    try:
        said = ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%K|%T|%R")
    except RunError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    rows = [line.split("|", 2) for line in said.splitlines()]
    return {number if number.isdigit() else "0": (state, where) for number, state, where in rows}


def ask(*command: str, fault: type[ConfigError] | type[RunError] = RunError) -> str:
    """Run a command of SLURM and return its output. Raises `fault` if it fails, RunError if it does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    except subprocess.TimeoutExpired as error:
        raise RunError(f"SLURM did not answer `{command[0]}` within {TIMEOUT} s") from error
    except OSError as error:
        raise RunError(f"{command[0]} could not be run: {error.strerror}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise fault(f"hydra/launcher=slurm: {command[0]} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout


def environment() -> dict[str, str]:
    """This process's environment without what SLURM set for the job that this process may be in.

    sbatch passes it on: the new job would requeue the enclosing array, take its count of restarts, its memory and GPUs.
    """
    inside = "SLURM_JOB_ID" in os.environ
    dropped = [name for name in os.environ if inside and OF_A_JOB.fullmatch(name)]
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"LC_ALL": "C"}


OF_A_JOB = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI2?|PMIX)_(?!CONF$).*|MASTER_(ADDR|PORT)|(CUDA|ROCR)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL"
)
"""Variables that SLURM or the batch script set in a job."""

OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
"""Final states of a job that is not requeued."""
SILENCE = 600
"""Seconds for which SLURM may be unavailable."""
SETTLE = 15
"""Seconds that a final state must last: a job that is requeued has one for a moment."""

Result: TypeAlias = float | Exception | None


class JobMonitor:
    """Follows the jobs of one submission until all are over. runs: their folders. limit: seconds in all."""

    def __init__(self, number: str, runs: Sequence[Path], limit: int) -> None:
        self._number, self._runs, self._limit = number, runs, limit
        self._deadline = time.monotonic() + limit
        self._shown: dict[int, tuple[str, str]] = {}
        self._state_since: dict[int, float] = {}

    def results(self) -> list[Result]:
        """Wait for all jobs. Returns each run's `eval/accuracy` or error; raises RunError if waiting itself fails."""
        pause = 1.0
        try:
            while not self._over(self._look()):
                self._check_deadline()
                time.sleep(pause)
                pause = min(pause * 1.2, 15.0)
        except KeyboardInterrupt:
            print(f"\nno longer waiting; the jobs continue, `scancel {self._number}` ends them")
            raise
        return [self._result(i, run) for i, run in enumerate(self._runs)]

    def _look(self) -> dict[str, tuple[str, str]]:
        """The jobs' states. Retries for SILENCE seconds, as SLURM may be restarting."""
        deadline = time.monotonic() + SILENCE
        while True:
            try:
                return states(self._number)
            except RunError as error:
                if time.monotonic() > deadline:
                    raise RunError(f"{error}, for {SILENCE} s; job {self._number} may still be running") from error
                time.sleep(5)

    def _over(self, states: dict[str, tuple[str, str]]) -> bool:
        now = time.monotonic()
        for i in range(len(self._runs)):
            seen = states.get(str(i), ("COMPLETED", ""))  # SLURM has forgotten it: the run's folder has the result
            if seen != self._shown.get(i):
                self._show(i, *seen)
                self._shown[i], self._state_since[i] = seen, now
        return all(
            state in OVER and (state == "COMPLETED" or now - self._state_since[i] >= SETTLE)
            for i, (state, _) in self._shown.items()
        )

    def _show(self, i: int, state: str, where: str) -> None:
        on = f" on {where}" if where and not where.startswith("(") else f" {where}" if where else ""
        print(f"{time.strftime('%H:%M:%S')} job {self._name(i)} {state}{on}", flush=True)

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            going = [self._name(i) for i, (state, _) in self._shown.items() if state not in OVER]
            raise RunError(
                f"hydra.launcher.wait_at_most={self._limit}: jobs {', '.join(going)} are not over; they continue, "
                f"`scancel {self._number}` ends them"
            )

    def _name(self, i: int) -> str:
        return f"{self._number}_{i}" if len(self._runs) > 1 else self._number

    def _result(self, i: int, run: Path) -> Result:
        state, where = self._shown[i]
        said = SavedRun(run).summary
        if state == "COMPLETED" and said.get("exit") == "done":
            accuracy = said.get("eval/accuracy")
            return None if accuracy is None else float(accuracy)
        log, cause = run / "slurm.log", str(said.get("exit", ""))
        reason = last_error(log) or (cause if cause != "done" else "") or "no error was printed"
        if not log.exists():
            reason = "the batch script did not begin: is hydra.sweep.dir on a file system that the nodes share?"
        ended = f"job {self._name(i)} ({run}) ended as {state} {where}: {reason}"
        error = RunError(f"{ended}; see {log}" if log.exists() else ended)
        print(f"grpocli: {error}", flush=True)
        return error


def last_error(log: Path) -> str | None:
    """The last error line of grpocli or else of SLURM in a log, without interruptions; None if there is none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for marks in (("grpocli: error: ", "grpocli: stopped: "), ("error: ",)):
        errors = [line for line in lines if any(mark in line for mark in marks) and not line.endswith(": interrupted")]
        if errors:
            return errors[-1].strip()
    return None
