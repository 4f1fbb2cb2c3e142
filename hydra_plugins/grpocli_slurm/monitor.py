"""Waiting for submitted jobs. squeue has their states and the runs' folders their results; sacct is not needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from grpocli.errors import RunError
from grpocli.runs.saved_run import SavedRun
from hydra_plugins.grpocli_slurm import cluster
from hydra_plugins.grpocli_slurm.prepare import SweepRun

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
    """Follows the jobs of one submission until all are over. limit: seconds in all."""

    def __init__(self, number: str, jobs: Sequence[SweepRun], limit: int) -> None:
        self._number, self._jobs, self._limit = number, jobs, limit
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
        return [self._result(i, job) for i, job in enumerate(self._jobs)]

    def _look(self) -> dict[str, tuple[str, str]]:
        """The jobs' states. Retries for SILENCE seconds, as SLURM may be restarting."""
        deadline = time.monotonic() + SILENCE
        while True:
            try:
                return cluster.states(self._number)
            except RunError as error:
                if time.monotonic() > deadline:
                    raise RunError(f"{error}, for {SILENCE} s; job {self._number} may still be running") from error
                time.sleep(5)

    def _over(self, states: dict[str, tuple[str, str]]) -> bool:
        now = time.monotonic()
        for i in range(len(self._jobs)):
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
        return f"{self._number}_{i}" if len(self._jobs) > 1 else self._number

    def _result(self, i: int, job: SweepRun) -> Result:
        state, where = self._shown[i]
        said = SavedRun(job.folder).summary
        if state == "COMPLETED" and said.get("exit") == "done":
            accuracy = said.get("eval/accuracy")
            return None if accuracy is None else float(accuracy)
        log, cause = job.folder / "slurm.log", str(said.get("exit", ""))
        reason = last_error(log) or (cause if cause != "done" else "") or "no error was printed"
        if not log.exists():
            reason = "the batch script did not begin: is hydra.sweep.dir on a file system that the nodes share?"
        ended = f"job {self._name(i)} ({job.folder}) ended as {state} {where}: {reason}"
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
