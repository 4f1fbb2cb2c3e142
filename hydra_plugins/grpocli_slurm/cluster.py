"""SLURM commands on the machine that submits: sbatch and squeue."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from grpocli.errors import ConfigError, RunError

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
