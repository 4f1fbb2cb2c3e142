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
OURS = (
    *("array", "error", "nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable"),
    *("requeue", "signal", "wait", "wrap"),
)
"""Options of sbatch on whose values the script relies."""


@section("hydra.launcher")
class Options:
    """What to ask SLURM for. null leaves an option to the cluster's default.

    name: the job's name. partition, account, qos, constraint, exclude: as sbatch has them.
    time: limit of one job: minutes, HH:MM:SS or D-HH:MM:SS. cpus: for each node. memory: for each node (`64G`).
    gpus: for each node, a number or `TYPE:NUMBER`; null: `hardware.devices_per_node` where that is of GPUs, else none.
    modules: loaded with `module load`. setup: lines of shell that run on the first node before anything else.
    container: an image that nodes run in (pyxis: `srun --container-image`). container_mounts: `HOST:INSIDE`; the
        folder of the runs is mounted anyway.
    python: the interpreter on the nodes; null: the one that submits.
    extra: any other options of sbatch: `extra.mail_type=END`, `extra.exclusive=true` (false: not given).
    signal_before: seconds before the time limit at which the run begins to stop, and what a part of the job gets to
        stop in. max_requeues: how often a job that stopped before its end is queued again.
    max_parallel: how many jobs of a sweep run at once; null: as many as there is room for.
    wait: whether the command waits for the jobs. wait_at_most: seconds; the jobs go on after them.
    dry_run: write and print the batch script, and submit nothing.
    """

    name: str = "grpocli"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus: int | None = None
    memory: str | None = None
    gpus: Any = None
    constraint: str | None = None
    exclude: str | None = None
    modules: list[str] = dataclasses.field(default_factory=list)
    setup: list[str] = dataclasses.field(default_factory=list)
    container: str | None = None
    container_mounts: list[str] = dataclasses.field(default_factory=list)
    python: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    signal_before: int = 120
    max_requeues: int = 10
    max_parallel: int | None = None
    wait: bool = True
    wait_at_most: int = 7 * 24 * 3600
    dry_run: bool = False

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
        ok = self.memory is None or bool(re.fullmatch(r"\d+[KMGT]?", self.memory, re.IGNORECASE))
        require(self, "memory", ok, "must be megabytes, or a number with K, M, G or T such as 64G")
        require(self, "max_requeues", self.max_requeues >= 0, "must be 0 (never) or more")
        require(self, "wait_at_most", self.wait_at_most >= 1, "must be at least 1 second")
        for field in ("partition", "account", "qos", "constraint", "exclude", "container"):
            require(self, field, "\n" not in str(getattr(self, field)), "must be one line")
        for name, value in self.extra.items():
            require(self, "extra", name.replace("_", "-") not in OURS, f"{name} is set by grpocli")
            require(self, "extra", "\n" not in f"{name}{value}", f"{name} must be one line")


def seconds(time: str) -> int:
    """Of a limit as sbatch takes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, left = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, left = parts
    else:
        hours, (minutes, left) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left


def options(values: Mapping[str, Any]) -> Options:
    """From what Hydra composed. Raises ConfigError for a value that cannot be."""
    plain: dict[str, Any] = {k: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for k, v in values.items()}
    return Options(**plain)


def register(target: str) -> None:
    """Make `hydra/launcher=slurm` a choice, whose launcher is the class `target`."""
    node = OmegaConf.structured(schema(Options))
    node["_target_"] = target
    OmegaConf.set_struct(node.extra, False)  # its keys are sbatch's: overriding one needs no `+`
    ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=node, provider="grpocli")
