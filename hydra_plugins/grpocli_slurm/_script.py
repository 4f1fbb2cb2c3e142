"""The batch script: sbatch options and settings, followed by `batch.sh`, which is the same for every job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.hardware import Multinode
from grpocli.version import __version__
from hydra_plugins.grpocli_slurm.options import Options

if TYPE_CHECKING:
    from grpocli.config.schema import Run

BODY = Path(__file__).with_name("batch.sh")


@dataclass(frozen=True, slots=True)
class JobNodes:
    """The nodes that a run needs."""

    train_nodes: int
    rollout_nodes: int
    gpus: str | None
    """For each node, as sbatch takes it; None for none."""

    @classmethod
    def of(cls, run: Run, options: Options) -> JobNodes:
        gpus = None if options.gpus is None else str(options.gpus)
        hardware = run.hardware
        if not isinstance(hardware, Multinode):
            return cls(1, 0, gpus)
        if gpus is None and hardware.device != "cpu":
            gpus = str(hardware.devices_per_node)
        return cls(hardware.train_nodes, hardware.rollout_nodes, gpus)

    @property
    def nodes(self) -> int:
        return self.train_nodes + self.rollout_nodes


@dataclass(frozen=True, slots=True)
class BatchScript:
    """The script that submits the runs of one batch."""

    options: Options
    resources: JobNodes
    folder: Path
    """Of the script and the logs."""
    runs: Sequence[Path]
    """The folders of the runs."""
    name: str
    """Of the script's file, without its ending."""
    config_dir: str | None = None
    """The value of `--config-dir`."""

    @property
    def script(self) -> Path:
        return self.folder / f"{self.name}.sh"

    @property
    def run_list(self) -> Path:
        """The file with the runs' folders, one a line, for an array."""
        return self.folder / f"{self.name}.runs"

    @property
    def log(self) -> str:
        """The file for a job's output, in sbatch's notation."""
        folder = str(self.folder).replace("%", "%%")
        return f"{folder}/slurm-{'%A_%a' if len(self.runs) > 1 else '%j'}.log"

    def text(self) -> str:
        """The whole script."""
        parts = [self._head(), self._settings(), self._environment(), BODY.read_text()]
        return "\n".join(part for part in parts if part)

    def _head(self) -> str:
        given = {name: value for name, value in self._sbatch().items() if value is not None and value is not False}
        lines = [f"#SBATCH --{_option(name, value)}" for name, value in given.items()]
        what = "one run" if len(self.runs) == 1 else f"an array of {len(self.runs)} runs"
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                "",
                f"# Written by grpocli {__version__}: {what}, {_shown(self.resources)}.",
                f"# `sbatch {shlex.quote(str(self.script))}` submits it; runs with a checkpoint continue.",
                "",
            ]
        )

    def _sbatch(self) -> dict[str, object]:
        o, last = self.options, len(self.runs) - 1
        parallel = "" if o.max_parallel is None else f"%{o.max_parallel}"
        chosen = {
            "job-name": o.name,
            "partition": o.partition,
            "account": o.account,
            "qos": o.qos,
            "time": o.time,
            "array": f"0-{last}{parallel}" if last else None,
            "nodes": self.resources.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.resources.gpus,
            "cpus-per-task": o.cpus,
            "mem": o.memory,
            "constraint": o.constraint,
            "exclude": o.exclude,
            "output": self.log,
            "open-mode": "append",
            "requeue" if o.max_requeues else "no-requeue": True,
            "signal": f"B:USR1@{o.signal_before}",
        }
        return chosen | {name.replace("_", "-"): value for name, value in o.extra.items()}

    def _settings(self) -> str:
        run, alone = shlex.quote(str(self.runs[0])), len(self.runs) == 1
        line = '"$((SLURM_ARRAY_TASK_ID + 1))p"'
        train = ["-m", "grpocli", "train", *(["--config-dir", self.config_dir] if self.config_dir else [])]
        return "\n".join(
            [
                f"JOB={'$SLURM_JOB_ID' if alone else '${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID'}",
                f"RUN_DIR={run}" if alone else f"RUN_DIR=$(sed -n {line} {shlex.quote(str(self.run_list))})",
                f"PYTHON={shlex.quote(self.options.python or sys.executable)}",
                f"LOGS={shlex.quote(str(self.folder))}",
                f'TRAIN=("$PYTHON" {shlex.join(train)} "resume=$RUN_DIR")',
                'ROLLOUT=("$PYTHON" -m grpocli.launch.rollout_node "$RUN_DIR")',
                f"TRAIN_NODES={self.resources.train_nodes}",
                f"ROLLOUT_NODES={self.resources.rollout_nodes}",
                f"MAX_REQUEUES={self.options.max_requeues}",
                f"GRACE={self.options.signal_before} # seconds that a part has to stop",
                f"SRUN=({shlex.join(self._srun())})",
                "",
            ]
        )

    def _srun(self) -> list[str]:
        o = self.options
        found = [] if o.cpus is None else [f"--cpus-per-task={o.cpus}"]
        if o.container is None:
            return found
        mounts = ",".join([f"{self.folder}:{self.folder}", *o.container_mounts])
        return [*found, f"--container-image={o.container}", f"--container-mounts={mounts}"]

    def _environment(self) -> str:
        lines = [f"module load {shlex.quote(name)}" for name in self.options.modules] + list(self.options.setup)
        return "\n".join([*lines, ""]) if lines else ""


def same_resources(requests: Sequence[JobNodes]) -> JobNodes:
    """The resources of an array. Raises ConfigError if its runs need different ones."""
    different = sorted(set(requests), key=lambda need: need.nodes)
    if len(different) > 1:
        both = " and ".join(map(_shown, different[:2]))
        raise ConfigError(
            f"all runs of an array need the same nodes, not {both}; submit a sweep for each", key="hardware"
        )
    return different[0]


def _shown(need: JobNodes) -> str:
    nodes = "one node" if need.nodes == 1 else f"{need.train_nodes} training and {need.rollout_nodes} vLLM nodes"
    return nodes if need.gpus is None else f"{nodes} with {need.gpus} GPUs each"


def _option(name: str, value: object) -> str:
    return name if value is True else f"{name}={shlex.quote(str(value))}"
