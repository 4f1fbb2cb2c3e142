"""What a page says about several runs: their labels, groups over seeds, results and differences."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpocli.report.page_data import RunView, Table
from grpocli.tracking.compare import differing_settings, short_names
from grpocli.tracking.runs import LAST_STEPS, RunRow
from grpocli.tracking.sessions import format_value

RESULTS = ("before", "accuracy", "change", "final reward", "seconds")
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; the normal one, 1.96, is used beyond 30."""


def labels(rows: Sequence[RunRow]) -> list[tuple[str, str, str]]:
    """(name, label, group) of each run. The label has the settings that differ; the group has them without the seed."""
    keys = differing_settings(rows) if len(rows) > 1 else []
    short = short_names(keys)
    found = []
    for name, row in zip(_names(rows), rows, strict=True):
        known = {key: f"{short[key]}={format_value(row.settings.get(key))}" for key in keys}
        group = ", ".join(text for key, text in known.items() if key != "seed")
        found.append((name, ", ".join(known.values()) or name, group or ("all seeds" if keys else name)))
    repeated = {label for _, label, _ in found if sum(label == other for _, other, _ in found) > 1}
    return [
        (name, f"{label} ({name})" if label in repeated and label != name else label, group)
        for name, label, group in found
    ]


def _names(rows: Sequence[RunRow]) -> list[str]:
    paths = [row.path.resolve() for row in rows]
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
    return [str(path.relative_to(common)) if path != common else path.name for path in paths]


def results(rows: Sequence[RunRow], runs: Sequence[RunView]) -> Table:
    """A row for each group of seeds, then one for each run."""
    groups: dict[str, list[RunRow]] = {}
    for row, run in zip(rows, runs, strict=True):
        groups.setdefault(run.group, []).append(row)
    body: list[list[Any]] = []
    for group, members in groups.items():
        done = [row for row in members if row.done]
        if len(members) > 1:
            body.append([f"{group} (mean)", len(done), *[_mean(done, name) for name in RESULTS], ""])
    body += [
        [run.label, 1, *[row.results[name] for name in RESULTS], run.state] for row, run in zip(rows, runs, strict=True)
    ]
    notes = [
        f"final reward: the mean over the last {LAST_STEPS} steps; before, accuracy: held-out, at temperature 1",
        "means: over the finished runs of a group, ± the half width of the 95 % t interval over seeds",
    ]
    return Table(["run", "runs", *RESULTS, "state"], body, notes)


def _mean(rows: Sequence[RunRow], name: str) -> Any:
    values = [row.results[name] for row in rows if row.results[name] is not None]
    if len(values) < 2:
        return values[0] if values else None
    freedom = len(values) - 1
    t = T_95[freedom - 1] if freedom <= len(T_95) else 2.228 if freedom <= 30 else 1.96
    return f"{statistics.fmean(values):.3f} ± {t * statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def differences(rows: Sequence[RunRow], runs: Sequence[RunView]) -> Table:
    """The keys that differ, a column for each run."""
    keys = differing_settings(rows)
    body = [[key, *[format_value(row.settings.get(key)) for row in rows]] for key in keys]
    return Table(["key", *[run.name for run in runs]], body)
