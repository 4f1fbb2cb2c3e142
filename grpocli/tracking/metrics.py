"""metrics.jsonl: one JSON object a step, never a step twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpocli.tracking.files import write_atomic


class MetricsLog:
    """Appends a line a step; each is on the disk before `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(line(step, metrics))
            file.flush()
            os.fsync(file.fileno())

    def truncate_after(self, step: int) -> None:
        """Forget steps after `step`, and a last line that was torn: what follows will be done again."""
        if self.path.exists():
            kept = [row for row in read(self.path) if row["step"] <= step]
            write_atomic(self.path, "".join(line(row.pop("step"), row) for row in kept))


def line(step: int, metrics: Mapping[str, Any]) -> str:
    """A row of valid JSON: what is not finite is null."""
    row = {"step": step} | {name: _plain(metrics[name]) for name in sorted(metrics)}
    return json.dumps(row, allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that was torn is left out."""
    rows = []
    for text in path.read_text().splitlines():
        try:
            rows.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
