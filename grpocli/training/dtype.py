"""In which precision a model computes. Weights and the maths on logits are float32 in any case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LARGE = 20_000_000
"""Parameters from which bfloat16 pays on a CPU that has it; below, the casts cost more than they save."""


def choose_dtype(dtype: str, part: Any, model_path: str, device: str) -> str:
    """`float32` or `bfloat16` for `model.dtype` (`auto`, or one of them), without loading the weights.

    part: the run's choice of `model`. Raises ConfigError where its config cannot be loaded.
    auto: bfloat16 on a GPU that has it, and on a CPU with bfloat16 instructions for models over 20 M parameters.
    """
    if dtype != "auto":
        return dtype
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    from grpocli.models.loading import count_parameters

    fast = cpu_has_bfloat16(Path("/proc/cpuinfo"))
    return "bfloat16" if fast and count_parameters(part, model_path) > LARGE else "float32"


def cpu_has_bfloat16(cpuinfo: Path) -> bool:
    """Whether matrix products in bfloat16 run in hardware."""
    return cpuinfo.is_file() and any(flag in cpuinfo.read_text() for flag in ("avx512_bf16", "amx_bf16", "bf16 "))
