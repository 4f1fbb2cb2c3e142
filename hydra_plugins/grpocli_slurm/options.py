"""The keys of `hydra.launcher` with `hydra/launcher=slurm`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from grpocli.config.parts import require, schema, section

TIME = re.compile(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})")
SET_BY_SCRIPT = (
    *("array", "error", "nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable"),
    *("requeue", "signal", "wait", "wrap"),
)
"""Options of sbatch that the script sets itself."""


@section("hydra.launcher")
class Options:
    """Options of SLURM jobs. null leaves an option to the cluster's default."""

    name: str = "grpocli"
    """Name of the job: letters, digits, dots and dashes."""
    partition: str | None = None
    """Partition, as for sbatch."""
    account: str | None = None
    """Account, as for sbatch."""
    qos: str | None = None
    """Quality of service, as for sbatch."""
    time: str | None = None
    """Time limit of a job: minutes, HH:MM:SS or D-HH:MM:SS."""
    cpus: int | None = None
    """CPUs of each node."""
    memory: str | None = None
    """Memory of each node: megabytes, or a number with K, M, G or T such as 64G."""
    gpus: Any = None
    """GPUs of each node, a number or TYPE:NUMBER such as h100:8; null: hardware.devices_per_node if those are GPUs,
    else none."""
    constraint: str | None = None
    """Features that nodes must have, as for sbatch."""
    exclude: str | None = None
    """Nodes to leave out, as for sbatch."""
    modules: list[str] = dataclasses.field(default_factory=list)
    """Modules to load with `module load`."""
    setup: list[str] = dataclasses.field(default_factory=list)
    """Lines of shell that run on the first node before anything else."""
    container: str | None = None
    """Image that the nodes run in (pyxis: `srun --container-image`)."""
    container_mounts: list[str] = dataclasses.field(default_factory=list)
    """Mounts of the container, HOST:INSIDE; the folder of the runs is always mounted."""
    python: str | None = None
    """Interpreter on the nodes; null: the one that submits."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Any other options of sbatch: `extra.mail_type=END`, `extra.exclusive=true` (false: not given)."""
    signal_before: int = 120
    """Seconds before the time limit at which the run begins to stop; also the time that each part of the job has to
    stop."""
    max_requeues: int = 10
    """How often a job that stopped before its end is queued again; 0: never."""
    max_parallel: int | None = None
    """Jobs of a sweep that run at once; null: no limit."""
    wait: bool = True
    """Wait for the jobs to end."""
    wait_at_most: int = 7 * 24 * 3600
    """Seconds to wait; the jobs continue afterwards."""
    dry_run: bool = False
    """Write and print the batch script, and submit nothing."""

    def __post_init__(self) -> None:
        require(self, "name", bool(re.fullmatch(r"[\w.-]+", self.name)), "use letters, digits, dots and dashes")
        ok = self.time is None or bool(TIME.fullmatch(self.time))
        require(self, "time", ok, "write minutes, HH:MM:SS or D-HH:MM:SS")
        for field in ("cpus", "max_parallel"):
            value = getattr(self, field)
            require(self, field, value is None or value >= 1, "must be null or at least 1")
        ok = self.gpus is None or bool(re.fullmatch(r"([\w.-]+:)?[1-9]\d*", str(self.gpus)))
        require(self, "gpus", ok, "must be null, a number, or TYPE:NUMBER such as h100:8")
        require(self, "signal_before", 1 <= self.signal_before <= 65535, "must be between 1 and 65535 seconds")
        ok = self.time is None or self.signal_before < seconds(self.time)
        require(self, "signal_before", ok, f"must be less than the time limit, hydra.launcher.time={self.time}")
        require(self, "max_requeues", self.max_requeues >= 0, "must be 0 (never) or more")
        require(self, "wait_at_most", self.wait_at_most >= 1, "must be at least 1 second")
        for field in ("partition", "account", "qos", "memory", "constraint", "exclude", "container"):
            require(self, field, "\n" not in str(getattr(self, field)), "must be one line")
        for name, value in self.extra.items():
            require(self, "extra", name.replace("_", "-") not in SET_BY_SCRIPT, f"{name} is set by grpocli")
            require(self, "extra", "\n" not in f"{name}{value}", f"{name} must be one line")


def seconds(time: str) -> int:
    """Seconds of a time limit of sbatch: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # hours
    hours, minutes, left = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left


def options(values: Mapping[str, Any]) -> Options:
    """The options that Hydra composed. Raises ConfigError for an invalid value."""
    plain: dict[str, Any] = {k: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for k, v in values.items()}
    return Options(**plain)


def register(target: str) -> None:
    """Make `hydra/launcher=slurm` a choice. target: the import path of the launcher class."""
    node = OmegaConf.structured(schema(Options))
    node["_target_"] = target
    OmegaConf.set_struct(node.extra, False)  # any option of sbatch is a key, without `+`
    ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=node, provider="grpocli")
