"""The batch script: options and settings, then `batch.sh`, which is the same for every job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.hardware.hardware import Multinode
from grpocli.launch.slurm.options import Options
from grpocli.version import __version__

if TYPE_CHECKING:
    from grpocli.config.schema import Run

BODY = Path(__file__).with_name("batch.sh")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run asks for. gpus: for each node (null: none)."""

    train_nodes: int
    rollout_nodes: int
    gpus: str | None

    @classmethod
    def of(cls, run: Run, options: Options) -> Shape:
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
class Batch:
    """The runs of one submission. config_dir: what `--config-dir` gave."""

    options: Options
    shape: Shape
    folder: Path
    runs: Sequence[Path]
    name: str
    config_dir: str | None = None

    @property
    def script(self) -> Path:
        return self.folder / f"{self.name}.sh"

    @property
    def run_list(self) -> Path:
        """A run's folder a line, for an array."""
        return self.folder / f"{self.name}.runs"

    @property
    def log(self) -> str:
        """Where SLURM writes what a job prints, in sbatch's notation."""
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
                f"# Written by grpocli {__version__}: {what}, {_shown(self.shape)}.",
                f"# `sbatch {shlex.quote(str(self.script))}` submits it; runs that were there before go on.",
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
            "nodes": self.shape.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.shape.gpus,
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
        run = shlex.quote(str(self.runs[0]))
        line = '"$((SLURM_ARRAY_TASK_ID + 1))p"'
        train = ["-m", "grpocli", "train", *(["--config-dir", self.config_dir] if self.config_dir else [])]
        return "\n".join(
            [
                f"RUN_DIR={run}"
                if len(self.runs) == 1
                else f"RUN_DIR=$(sed -n {line} {shlex.quote(str(self.run_list))})",
                f"PYTHON={shlex.quote(self.options.python or sys.executable)}",
                f"LOGS={shlex.quote(str(self.folder))}",
                f'TRAIN=("$PYTHON" {shlex.join(train)} "resume=$RUN_DIR")',
                'ROLLOUT=("$PYTHON" -m grpocli.launch.rollout_node "$RUN_DIR")',
                f"TRAIN_NODES={self.shape.train_nodes}",
                f"ROLLOUT_NODES={self.shape.rollout_nodes}",
                f"MAX_REQUEUES={self.options.max_requeues}",
                f"GRACE={self.options.signal_before} # seconds that a part gets to stop in",
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


def one_shape(shapes: Sequence[Shape]) -> Shape:
    """What all runs of an array ask for. Raises ConfigError where they differ."""
    different = sorted(set(shapes), key=lambda shape: shape.nodes)
    if len(different) > 1:
        both = " and ".join(map(_shown, different[:2]))
        raise ConfigError(f"hardware: an array's jobs are alike, and these need {both}; submit one sweep for each")
    return different[0]


def _shown(shape: Shape) -> str:
    nodes = "one node" if shape.nodes == 1 else f"{shape.train_nodes} training and {shape.rollout_nodes} vLLM nodes"
    return nodes if shape.gpus is None else f"{nodes} with {shape.gpus} GPUs each"


def _option(name: str, value: object) -> str:
    return name if value is True else f"{name}={shlex.quote(str(value))}"
