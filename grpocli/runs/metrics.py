"""The numbers of a run: metrics.jsonl, one JSON object per step, and summary.json, the outcome of the run."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.files import write_atomic

RESERVE = ".reserve"
RESERVE_BYTES = 1 << 14


class MetricsLog:
    """The file metrics.jsonl. A line is on the disk before `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the line of a step. Raises OSError, and leaves the file unchanged, if it cannot be written."""
        left = json_line(step, metrics).encode()
        with self.path.open("ab", buffering=0) as file:
            whole = file.tell()
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), whole)
                raise

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Add metrics to the line of a step."""
        rows = read_metrics(self.path)
        lines = [json_line(row["step"], row | dict(more) if row["step"] == step else row) for row in rows]
        write_atomic(self.path, "".join(lines))

    def truncate_after(self, step: int) -> int:
        """Delete the lines after `step`, which a resume does again, and a torn last line.

        If a step has two lines, the later one stays. Returns how many of the steps 1 to `step` are missing.
        """
        if not self.path.exists():
            return step
        kept = {row.pop("step"): row for row in read_metrics(self.path) if row["step"] <= step}
        write_atomic(self.path, "".join(json_line(n, kept[n]) for n in sorted(kept)))
        return len(set(range(1, step + 1)) - kept.keys())


def json_line(step: int, metrics: Mapping[str, Any]) -> str:
    """A line of valid JSON; numbers that are not finite are null."""
    row = {"step": step} | {name: to_json(metrics[name]) for name in sorted(metrics) if name != "step"}
    return json.dumps(row, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a torn last line is left out.

    Raises ConfigError, with the line number, if another line is broken.
    """
    *lines, torn = path.read_text(errors="replace").split("\n")
    rows = [_row(path, number, text) for number, text in enumerate(lines, start=1)]
    return rows + [row for row in [_parse(torn)] if row is not None]


def to_json(value: Any) -> Any:
    """A value in JSON types: null for numbers that are not finite, plain numbers for those of numpy and torch."""
    if isinstance(value, Mapping):
        return {name: to_json(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if not isinstance(value, str | bool | int | float | None) and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(path: Path, number: int, text: str) -> dict[str, Any]:
    row = _parse(text)
    if row is None:
        raise ConfigError(f"{path}: line {number} is not a JSON object with a step; delete that line")
    return row


def _parse(text: str) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -sys.float_info.max <= value <= sys.float_info.max else None


def read_summary(path: Path) -> dict[str, Any]:
    """The content of a summary.json; empty if there is none. Raises ValueError if it is broken."""
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError("summary.json is broken") from error
    if not isinstance(summary, dict):
        raise ValueError("summary.json is broken")
    return summary


def finished_steps(path: Path) -> int | None:
    """The number of steps of a finished run; None if it is not finished, or its summary cannot be read."""
    try:
        summary = read_summary(path)
        return int(summary["steps"]) if summary["exit"] == "done" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ended_early(summary: Mapping[str, Any], metric: Any, threshold: Any) -> str:
    """Why a run is finished before its last step, such as `eval/accuracy is 0.94, at least ...`; empty if it is not.

    metric, threshold: `eval.stop_at` of its config, which a resume may have changed since the summary.
    """
    early = summary.get("ended_early")
    if not isinstance(early, Mapping) or not isinstance(metric, str):
        return ""
    name, value, limit = early.get("metric"), number(early.get("value")), number(threshold)
    if name != f"eval/{metric.removeprefix('eval/')}" or value is None or limit is None or value < limit:
        return ""
    return f"{name} is {value:.3f}, at least eval.stop_at.threshold={limit:g}"


def ended_by_callback(summary: Mapping[str, Any]) -> str:
    """Why a callback ended a run before its last step; empty if none did."""
    early = summary.get("ended_early")
    reason = early.get("callback") if isinstance(early, Mapping) else None
    return reason if isinstance(reason, str) else ""


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
    incomparable: str = "",
    early: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    cause: "done", or why the run did not finish. kind: `done`, `stopped` or `failed`. incomparable: why `before` and
    `after` cannot be compared. early: the metric, its value and the threshold of `eval.stop_at` that ended the run.
    """
    summary: dict[str, Any] = {"steps": steps, "seconds": round(seconds, 1), "exit": cause, "exit_kind": kind}
    if early:
        summary["ended_early"] = dict(early)
    summary |= {f"{name}_before": value for name, value in before.items()}
    summary |= after
    if incomparable and before and after:
        summary["eval/incomparable"] = incomparable
    summary["last"] = dict(metrics)
    return summary
