"""A config of accelerate: the number of processes, and how they share the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli_tools.porting.source import read_mapping
from grpocli_tools.porting.translation import Port

MARKS = ("compute_environment", "distributed_type", "deepspeed_config", "fsdp_config", "mixed_precision")
"""Keys that only a config of accelerate has."""
HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""model.dtype by its name in accelerate and TRL."""


def is_accelerate(values: Mapping[str, Any]) -> bool:
    """Whether a mapping is a config of accelerate."""
    return any(name in values for name in MARKS)


@dataclass(frozen=True, slots=True)
class Accelerate:
    """A config of accelerate. processes: those of the training, on all machines."""

    name: str
    values: Mapping[str, Any]

    @property
    def processes(self) -> int | None:
        count = self.values.get("num_processes")
        return count if isinstance(count, int) and count > 0 else None

    def add(self, port: Port) -> None:
        """Add the overrides to those of the script."""
        if self.processes and self.processes > 1:
            port.set("hardware.processes", self.processes, "num_processes", note=self.name)
        machines = self.values.get("num_machines")
        if isinstance(machines, int) and machines > 1:
            port.check("num_machines", machines, f"set hardware=multinode hardware.train_nodes={machines}")
        self._shard(port)
        precision = self.values.get("mixed_precision")
        if precision in HALVES and port.value("model.dtype") is None:
            port.set("model.dtype", HALVES[precision], "mixed_precision", note=str(precision))
        elif precision == "fp8":
            port.lack("mixed_precision", precision, "training is in bfloat16, float16 or float32")
        if self.values.get("use_cpu"):
            port.set("hardware.device", "cpu", "use_cpu")

    def _shard(self, port: Port) -> None:
        kind = str(self.values.get("distributed_type", "")).upper()
        config = self.values.get("deepspeed_config" if kind == "DEEPSPEED" else "fsdp_config")
        config = config if isinstance(config, dict) else {}
        if kind == "FSDP":
            port.set("hardware.parallel", "fsdp2", "distributed_type", note="FSDP")
        elif kind == "DEEPSPEED" and isinstance(stage := config.get("zero_stage"), int):
            if stage in (2, 3):
                port.set("hardware.parallel", f"zero{stage}", "zero_stage", note=f"{stage}; fsdp2 needs no DeepSpeed")
            elif stage == 1:
                port.lack("zero_stage", 1, "hardware.parallel=zero2 is the nearest")
        elif kind == "DEEPSPEED":
            port.check("deepspeed_config", config, "its stage is not read; set hardware.parallel=zero2 or zero3")
        for name in ("offload_optimizer_device", "offload_param_device", "fsdp_offload_params"):
            if str(config.get(name, "none")).lower() not in ("none", "false"):
                port.lack(name, config[name], "weights and optimizer state stay on the GPUs")


def read_accelerate(file: Path) -> Accelerate:
    """The config of accelerate in a file. Raises ConfigError for another file."""
    values = read_mapping(file)
    if not is_accelerate(values):
        raise ConfigError("is not a config of accelerate", key="--accelerate", value=file)
    return Accelerate(file.name, values)
