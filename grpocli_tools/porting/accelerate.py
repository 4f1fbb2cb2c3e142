"""A config of accelerate: the number of processes, and how they share the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpocli_tools.porting.port import Port

MARKS = ("compute_environment", "distributed_type", "deepspeed_config", "fsdp_config", "mixed_precision")
"""Keys that only a config of accelerate has."""
HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""model.dtype by its name in accelerate and TRL."""


def is_accelerate(values: Mapping[str, Any]) -> bool:
    """Whether a mapping is a config of accelerate."""
    return any(name in values for name in MARKS)


def add_accelerate(port: Port, values: Mapping[str, Any]) -> None:
    """Add the overrides of a config to those of the script."""
    if (values.get("num_processes") or 1) > 1:
        port.set("hardware.processes", values["num_processes"], "num_processes")
    if (machines := values.get("num_machines") or 1) > 1:
        port.check("num_machines", machines, f"set hardware=multinode hardware.train_nodes={machines}")
    precision = values.get("mixed_precision")
    if precision in HALVES and port.value("model.dtype") is None:
        port.set("model.dtype", HALVES[precision], "mixed_precision", note=str(precision))
    elif precision == "fp8":
        port.lack("mixed_precision", precision, "training is in bfloat16, float16 or float32")
    if values.get("use_cpu"):
        port.set("hardware.device", "cpu", "use_cpu")
    kind = str(values.get("distributed_type", "")).upper()
    config = values.get("deepspeed_config" if kind == "DEEPSPEED" else "fsdp_config") or {}
    if kind == "FSDP":
        port.set("hardware.parallel", "fsdp2", "distributed_type", note="FSDP")
    elif kind == "DEEPSPEED":
        stage = config.get("zero_stage")
        if stage in (2, 3):
            port.set("hardware.parallel", f"zero{stage}", "zero_stage", note=f"{stage}; fsdp2 needs no DeepSpeed")
        else:
            port.check("zero_stage", stage, "hardware.parallel=zero2 and zero3 are the stages here")
    for name in ("offload_optimizer_device", "offload_param_device", "fsdp_offload_params"):
        if str(config.get(name, "none")).lower() not in ("none", "false"):
            port.lack(name, config[name], "weights and optimizer state stay on the GPUs")
