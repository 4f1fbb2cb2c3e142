"""summary.json: how a run ended."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpocli.files import write_atomic
from grpocli.tracking.metrics import finite

RESERVE = ".reserve"
RESERVE_BYTES = 1 << 14


def finished(path: Path) -> int | None:
    """The steps of a finished run; None for a run that is not finished, or has no readable summary."""
    try:
        summary = json.loads(path.read_text())
        return int(summary["steps"]) if summary["exit"] == "done" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def reserve(path: Path) -> None:
    """Reserve space for the summary at `path`, in case the disk fills up before the run ends."""
    write_atomic(path.with_name(RESERVE), os.urandom(RESERVE_BYTES))


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a `summary_of` a run, in the space that was reserved for it."""
    path.with_name(RESERVE).unlink(missing_ok=True)
    write_atomic(path, json.dumps(finite(summary), indent=2) + "\n")


def summary_of(
    *,
    steps: int,
    seconds: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
    metrics: Mapping[str, Any],
    cause: str,
    incomparable: str = "",
) -> dict[str, Any]:
    """How a run ended. cause: "done", or why the run ended before it was. incomparable: why the change from `before` to
    `after` is not given."""
    summary: dict[str, Any] = {"steps": steps, "seconds": round(seconds, 1), "exit": cause}
    summary |= {f"{name}_before": value for name, value in before.items()}
    summary |= after
    if incomparable and before and after:
        summary["eval/incomparable"] = incomparable
    summary["last"] = dict(metrics)
    return summary
