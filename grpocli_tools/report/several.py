"""What a page says about several runs: their labels, groups over seeds, results and differences."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpocli.runs.saved_run import GROUPS
from grpocli.runs.sessions import format_value
from grpocli_tools.evaluation.significance import MEANS
from grpocli_tools.report.comparison import differing_settings, seed_mean, short_names
from grpocli_tools.report.page_data import PageTable, RunView
from grpocli_tools.report.run_rows import LAST_STEPS, RunRow

LONGEST_LABEL = 80
"""Characters of settings in a label; beyond them a run is called by its folder."""
RESULTS = ("before", "accuracy", "change", "final reward", "seconds")


def labels(rows: Sequence[RunRow]) -> list[tuple[str, str, str]]:
    """(name, label, group) of each run. The label has the settings that differ; the group has them without the seed.

    Settings that follow from typed ones are in neither: `reward` with `algorithm=dapo`. A run with a `name` is labelled
    by it, and one with too many settings by its folder; a group then by its first run.
    """
    keys = _label_keys(rows) if len(rows) > 1 else []
    short = short_names(keys, rows)
    found = []
    groups: dict[str, str] = {}
    for name, row in zip(_names(rows), rows, strict=True):
        known = {key: _label(key, short[key], row.settings.get(key)) for key in keys}
        group = ", ".join(text for key, text in known.items() if key != "seed") or ("all seeds" if keys else name)
        settings = ", ".join(known.values())
        own = str(row.settings.get("name") or (settings if 0 < len(settings) <= LONGEST_LABEL else name))
        found.append((name, own, groups.setdefault(group, group if len(group) <= LONGEST_LABEL else f"as {own}")))
    repeated = {label for _, label, _ in found if sum(label == other for _, other, _ in found) > 1}
    return [
        (name, f"{label} ({name})" if label in repeated and label != name else label, group)
        for name, label, group in found
    ]


def _label_keys(rows: Sequence[RunRow]) -> list[str]:
    keys = differing_settings(rows)
    typed = {key for row in rows for key in row.typed or []}
    asked = [key for key in keys if key in typed and key != "seed"]
    return [key for key in keys if key in typed or not _follows(key, asked, rows)]


def _follows(key: str, asked: Sequence[str], rows: Sequence[RunRow]) -> bool:
    """Whether the values of other keys determine a key's."""
    seen: dict[tuple[str, ...], str] = {}
    for row in rows:
        values = tuple(str(row.settings.get(other)) for other in asked)
        if seen.setdefault(values, str(row.settings.get(key))) != str(row.settings.get(key)):
            return False
    return bool(asked)


def _label(key: str, short: str, value: Any) -> str:
    """`dapo`, `lr=0.001`."""
    return format_value(value) if key in GROUPS and value is not None else f"{short}={format_value(value)}"


def natural(path: Path) -> list[tuple[int, int | str]]:
    """A key that sorts `run2` before `run10`."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path))]


def _names(rows: Sequence[RunRow]) -> list[str]:
    paths = [row.path.resolve() for row in rows]
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
    return [str(path.relative_to(common)) if path != common else path.name for path in paths]


def results(rows: Sequence[RunRow], runs: Sequence[RunView]) -> PageTable:
    """A row for each group of seeds, then one for each run."""
    groups: dict[str, list[RunRow]] = {}
    for row, run in zip(rows, runs, strict=True):
        groups.setdefault(run.group, []).append(row)
    body: list[list[Any]] = []
    for group, members in groups.items():
        done = [row for row in members if row.done]
        if len(members) > 1:
            body.append([f"{group} (mean)", len(done), *[seed_mean(done, name) for name in RESULTS], ""])
    body += [
        [run.label, 1, *[row.results[name] for name in RESULTS], run.state] for row, run in zip(rows, runs, strict=True)
    ]
    notes = [
        f"final reward: the mean over the last {LAST_STEPS} steps; before, accuracy: held-out, at temperature 1",
        f"means: over the finished runs of a group, {MEANS}",
    ]
    return PageTable(["run", "runs", *RESULTS, "state"], body, notes)


def differences(rows: Sequence[RunRow], runs: Sequence[RunView]) -> PageTable:
    """A row for each run with the keys that differ; for each group if runs of a group differ only in the seed."""
    keys = differing_settings(rows)
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        values = tuple(format_value(row.settings.get(key)) for key in keys if key != "seed")
        groups.setdefault(values, []).append(number)
    if "seed" not in keys or len(groups) == len(rows):
        body = [
            [run.name, *[format_value(row.settings.get(key)) for key in keys]]
            for row, run in zip(rows, runs, strict=True)
        ]
        return PageTable(["run", *keys], body)
    names = [key for key in keys if key != "seed"]
    found: list[list[Any]] = [
        [
            runs[numbers[0]].group,
            *values,
            ", ".join(format_value(rows[number].settings.get("seed")) for number in numbers),
        ]
        for values, numbers in groups.items()
    ]
    return PageTable(["runs", *names, "seed"], found)
