"""The numbers of a run: metrics.jsonl, one JSON object per step, and summary.json, the outcome of the run."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.files import write_atomic

RESERVE = ".reserve"
RESERVE_BYTES = 1 << 14
LONGEST = 100_000
"""The most bytes of an array that is written."""


@dataclass(frozen=True, slots=True)
class MetricsLog:
    """The file metrics.jsonl. A line is on the disk before `append` returns; a full disk may leave a part of it."""

    path: Path

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the line of a step."""
        with self.path.open("a") as file:
            file.write(json_line(step, metrics))
            file.flush()
            os.fsync(file.fileno())

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Add metrics to the line of a step."""
        rows = read_metrics(self.path)
        lines = [json_line(row["step"], row | dict(more) if row["step"] == step else row) for row in rows]
        write_atomic(self.path, "".join(lines))

    def truncate_after(self, step: int) -> int:
        """Delete the lines after `step`, which a resume does again, and a torn last line.

        If a step has two lines, the later one stays. Returns how many of the steps 1 to `step` are missing.
        """
        kept = {row.pop("step"): row for row in read_metrics(self.path) if row["step"] <= step}
        if self.path.exists():
            write_atomic(self.path, "".join(json_line(n, kept[n]) for n in sorted(kept)))
        return len(set(range(1, step + 1)) - kept.keys())


def json_line(step: int, metrics: Mapping[str, Any]) -> str:
    """A line of valid JSON; numbers that are not finite are null."""
    row = {"step": step} | {name: to_json(metrics[name]) for name in sorted(metrics) if name != "step"}
    return json.dumps(row, allow_nan=False) + "\n"


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int], int]:
    """The rows of a metrics.jsonl, and the numbers of broken lines; none if there is no file.

    The third is the number of a broken last line without its end, as a kill leaves it; 0 without one.
    """
    if not path.is_file():
        return [], [], 0
    lines = path.read_bytes().split(b"\n")
    found = {n: _parse(line) for n, line in enumerate(lines, start=1) if line.strip()}
    broken = [n for n, row in found.items() if row is None]
    torn = broken.pop() if broken[-1:] == [len(lines)] else 0
    return [row for row in found.values() if row is not None], broken, torn


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a torn last line is left out.

    Raises ConfigError, with the line number, if another line is broken.
    """
    rows, broken, _ = read_lines(path)
    if broken:
        raise ConfigError(f"{path}: line {broken[0]} is not a JSON object with a step; delete that line")
    return rows


def to_json(value: Any) -> Any:
    """A value in JSON types: null for numbers that are not finite, numbers and lists for those of numpy and torch.

    Dates and decimals become text; images, bytes and large arrays the name of their type.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, Decimal | date | time | timedelta):
        return str(value)
    if hasattr(value, "tolist") and value.nbytes <= LONGEST:  # of numpy or torch, a single number too
        return to_json(value.tolist())
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else f"<{type(value).__name__}>"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -sys.float_info.max <= value <= sys.float_info.max else None


def read_summary(path: Path) -> dict[str, Any]:
    """The content of a summary.json; empty if there is none. Raises ValueError if it is broken."""
    summary = json.loads(path.read_text()) if path.is_file() else {}
    if not isinstance(summary, dict):
        raise ValueError("summary.json holds no object")
    return summary


def reserve_space(path: Path) -> None:
    """Reserve disk space for the summary at `path`, in case the disk fills up before the run ends."""
    write_atomic(path.with_name(RESERVE), os.urandom(RESERVE_BYTES))


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a `summary_of` a run, using the reserved disk space."""
    path.with_name(RESERVE).unlink(missing_ok=True)
    write_atomic(path, json.dumps(to_json(summary), indent=2) + "\n")


def summary_of(
    *,
    steps: int,
    seconds: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
    metrics: Mapping[str, Any],
    cause: str,
    kind: str,
    remedy: str = "",
    incomparable: str = "",
    early: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    cause: "done", or why the run did not finish. kind: `done`, `stopped` or `failed`. remedy: how to go on.
    incomparable: why `before` and `after` cannot be compared. early: the metric, its value and the threshold of
    `eval.stop_at` that ended the run.
    """
    end = f"{cause}; {remedy}" if remedy else cause
    summary: dict[str, Any] = {"steps": steps, "seconds": round(seconds, 1), "exit": end, "exit_kind": kind}
    summary |= {"exit_cause": cause} if kind != "done" else {}
    summary |= {"ended_early": dict(early)} if early else {}
    summary |= {f"{name}_before": value for name, value in before.items()}
    summary |= after
    summary |= {"eval/incomparable": incomparable} if incomparable and before and after else {}
    return summary | {"last": dict(metrics)}
