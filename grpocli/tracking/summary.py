"""summary.json: how a run ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpocli.tracking.files import write_atomic


def write_summary(
    path: Path,
    *,
    steps: int,
    seconds: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
    metrics: Mapping[str, Any],
    cause: str,
) -> dict[str, Any]:
    """Write and return it. cause: "done", or why the run ended before it was."""
    summary: dict[str, Any] = {"steps": steps, "seconds": round(seconds, 1), "exit": cause}
    summary |= {f"{name}_before": value for name, value in before.items()}
    summary |= after
    summary["last"] = dict(metrics)
    write_atomic(path, json.dumps(_finite(summary), indent=2) + "\n")
    return summary


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
