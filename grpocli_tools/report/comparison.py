"""The runs below some folders as rows: their settings and results, what distinguishes them, and means over seeds."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.runs.metrics import number
from grpocli.runs.saved_run import GROUPS, SavedRun, run_folders, suggest_run
from grpocli.runs.sessions import format_value
from grpocli_tools.evaluation.significance import MEANS, Paired, mean_text
from grpocli_tools.report.page_data import PageTable

LAST_STEPS = 10
"""The final reward is the mean over this many steps, because single steps are noisy."""
RESULTS = ("steps", "before", "accuracy", "change", "final reward", "seconds", "exit")
AVERAGED = ("before", "accuracy", "change", "final reward", "seconds")
IGNORED = ("resume", "resume_other_weights", "tracker", "hydra", "name")
"""Sections that do not distinguish runs."""
LONGEST_LABEL = 80
"""Characters of settings in a label; beyond them a run is called by its folder."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run; of a damaged one what can be read."""

    run: SavedRun
    settings: Mapping[str, Any]
    """The choices of config groups (`algorithm`, `algorithm/kl`, `reward`) and every key of its config."""
    results: dict[str, Any]
    """By the names of RESULTS; `exit` names broken files."""
    incomparable: str = ""
    """Why `before` and `accuracy` cannot be compared."""
    paired: Paired | None = None
    """Their paired test; None if their values by problem were not recorded."""

    @classmethod
    def read(cls, path: Path) -> RunRow:
        """The row of a run's folder."""
        run = SavedRun(path)
        rewards = "+".join(run.section("reward"))
        settings = run.choices | ({"reward": rewards} if rewards else {}) | run.flat
        unread = dict.fromkeys(RESULTS)
        if not run.config and run.dir.config.is_file():
            return cls(run, {}, unread | {"exit": f"unreadable: {run.problems[0]}"})
        try:
            run.check() if run.config else run
        except ConfigError as error:
            return cls(run, settings, unread | {"exit": f"unreadable: {error}"})
        values = [run.outcome.get(f"eval/accuracy_by_problem{end}") for end in ("_before", "")]
        paired = Paired.of(*values) if all(isinstance(one, Mapping) for one in values) else None  # type: ignore[arg-type]
        results = _results(run)
        if results["change"] is not None and run.incomparable:
            return cls(run, settings, results | {"change": None}, run.incomparable)
        return cls(run, settings, results, paired=paired)

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def typed(self) -> list[str]:
        """The keys given on its command line, in order; config groups as `algorithm/kl`."""
        return [text.lstrip("+~").partition("=")[0].partition("@")[0] for text in self.run.overrides]

    @property
    def done(self) -> bool:
        return bool(self.results["exit"] == "done")


def _results(run: SavedRun) -> dict[str, Any]:
    rewards = [reward for row in run.metrics[-LAST_STEPS:] if (reward := number(row.get("reward"))) is not None]
    before, after = (number(run.outcome.get(name)) for name in ("eval/accuracy_before", "eval/accuracy"))
    never = "unfinished" if run.config else "not started"
    return {
        "steps": run.metrics[-1]["step"] if run.metrics else 0,
        "before": before,
        "accuracy": after,
        "change": None if before is None or after is None else after - before,
        "final reward": statistics.mean(rewards) if rewards else None,
        "seconds": number(run.outcome.get("seconds")),
        "exit": "running" if run.dir.is_running() else str(run.outcome.get("exit", never)),
    }


def find_runs(folders: Sequence[Path]) -> list[RunRow]:
    """The runs in and below some folders, each once, `run2` before `run10`; unfinished and broken ones included.

    Raises ConfigError if a folder does not exist, or if there is no run.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder{suggest_run(folder)}")
    paths = {p.resolve(): p for folder in folders for p in sorted(run_folders(folder), key=_natural)}
    if not paths:
        raise ConfigError(f"there is no run below {', '.join(map(str, folders))}: no folder there has a config.yaml")
    return [RunRow.read(path) for path in paths.values()]


def _natural(path: Path) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path))]


def differing_settings(rows: Sequence[RunRow]) -> list[str]:
    """The keys that distinguish the runs, without the many keys that follow from a choice.

    In this order: choices of config groups; keys given on a command line; keys that differ between runs that are equal
    in all of these; the seed.
    """
    readable = [row for row in rows if row.run.config] or rows
    differ = [
        key
        for key in dict.fromkeys(key for row in readable for key in row.settings)
        if key.split(".")[0] not in IGNORED and _varies(readable, key)
    ]
    typed = {key for row in readable for key in row.typed}
    groups = [key for key in (*GROUPS, "reward") if key in differ]
    chosen = [*groups, *(key for key in differ if key in typed and key not in groups and key != "seed")]
    seed = [key for key in ("seed",) if key in differ]
    for key in sorted(set(differ) - {*chosen, *seed}, key=lambda key: ("/" not in key, key)):
        if any(_varies(alike, key) for alike in group_by(readable, chosen)):
            chosen.append(key)
    return chosen + seed


def _varies(rows: Sequence[RunRow], key: str) -> bool:
    return len({str(row.settings.get(key)) for row in rows}) > 1


def group_by(rows: Sequence[RunRow], keys: Sequence[str]) -> list[list[RunRow]]:
    """The runs that are equal in these keys, together."""
    groups: dict[tuple[str, ...], list[RunRow]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.settings.get(key)) for key in keys), []).append(row)
    return list(groups.values())


def short_names(keys: Sequence[str], rows: Sequence[RunRow]) -> dict[str, str]:
    """`lr` for `optim.lr`; two components for longer keys and names that other keys of the runs have."""
    names: dict[str, str] = {}
    known = {*keys, *(key for row in rows for key in row.settings)}
    for key in keys:
        parts = key.split(".")
        taken = {*RESULTS, *(k.split(".")[-1] for k in known if k != key)}
        short = parts[-1] if len(parts) < 3 and parts[-1] not in taken else ".".join(parts[-2:])
        names[key] = key if short in names.values() else short
    return names


def seed_mean(rows: Sequence[RunRow], result: str) -> Any:
    """The mean of a result with its interval, the only value, or None."""
    numbers = [row.results[result] for row in rows if row.results[result] is not None]
    if len(numbers) < 2:
        return numbers[0] if numbers else None
    return mean_text(numbers, 1 if result == "seconds" else 3)


@dataclass(frozen=True, slots=True)
class Label:
    """How a run is called among others."""

    name: str
    """Its folder, as short as is unambiguous."""
    label: str
    """Its own name, or the settings that differ; its folder if these are too many."""
    group: str
    """The label without the seed: runs of one group differ only in it."""


def labels(rows: Sequence[RunRow]) -> list[Label]:
    """The label of each run. Settings that follow from typed ones are left out: `reward` with `algorithm=dapo`."""
    keys = _label_keys(rows) if len(rows) > 1 else []
    short = short_names(keys, rows)
    found = []
    groups: dict[str, str] = {}
    for name, row in zip(folder_names(rows), rows, strict=True):
        known = {key: _setting(key, short[key], row.settings.get(key)) for key in keys}
        group = ", ".join(text for key, text in known.items() if key != "seed") or ("all seeds" if keys else name)
        settings = ", ".join(known.values())
        own = str(row.settings.get("name") or (settings if 0 < len(settings) <= LONGEST_LABEL else name))
        found.append(Label(name, own, groups.setdefault(group, group if len(group) <= LONGEST_LABEL else f"as {own}")))
    repeated = {label for label, same in groupby(sorted(one.label for one in found)) if len(list(same)) > 1}
    return [
        Label(one.name, f"{one.label} ({one.name})", one.group) if one.label in repeated - {one.name} else one
        for one in found
    ]


def _label_keys(rows: Sequence[RunRow]) -> list[str]:
    keys = differing_settings(rows)
    typed = {key for row in rows for key in row.typed}
    asked = [key for key in keys if key in typed and key != "seed"]
    follows = {key for key in keys if asked and not any(_varies(alike, key) for alike in group_by(rows, asked))}
    return [key for key in keys if key in typed or key not in follows]


def _setting(key: str, short: str, value: Any) -> str:
    """`dapo`, `lr=0.001`."""
    return format_value(value) if key in GROUPS and value is not None else f"{short}={format_value(value)}"


def folder_names(rows: Sequence[RunRow]) -> list[str]:
    """The path of each run below the folder that all runs share."""
    paths = [row.path.resolve() for row in rows]
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
    return [str(path.relative_to(common)) if path != common else path.name for path in paths]


@dataclass(frozen=True, slots=True)
class RunTable:
    """A table to print."""

    title: str
    header: list[str]
    body: list[list[Any]]
    """Numbers, texts, lists or None."""
    notes: list[str] = field(default_factory=list)
    """Sentences printed below it."""


def compare(folders: Sequence[Path], sort: str = "accuracy") -> list[RunTable]:
    """A table of the runs, best first, and a table of means over seeds if there are several seeds."""
    rows = find_runs(folders)
    if sort != "path":
        rows.sort(key=lambda row: (row.results[sort] is None, -(row.results[sort] or 0.0)))
    keys = differing_settings(rows)
    names = short_names(keys, rows)
    tables = [_run_table(rows, keys, names)]
    others = [key for key in keys if key != "seed"]
    if "seed" in keys and any(len(group) > 1 for group in group_by(rows, others)):
        done = group_by([row for row in rows if row.done], others)
        body = [
            [*[group[0].settings.get(k) for k in others], len(group), *[seed_mean(group, one) for one in AVERAGED]]
            for group in done
        ]
        tables.append(RunTable(f"means over seeds ({MEANS})", [*(names[k] for k in others), "runs", *AVERAGED], body))
    return tables


def _run_table(rows: Sequence[RunRow], keys: Sequence[str], names: Mapping[str, str]) -> RunTable:
    own = [row.settings.get("name") for row in rows]
    paths = [f"{name} ({path})" if name else path for name, path in zip(own, folder_names(rows), strict=True)]
    body = [
        [path, *[row.settings.get(k) for k in keys], *row.results.values()]
        for path, row in zip(paths, rows, strict=True)
    ]
    shown = list(zip(paths, rows, strict=True))
    notes = [f"{path} has no change: {row.incomparable}" for path, row in shown if row.incomparable]
    if tested := [(path, row.paired.clear) for path, row in shown if row.paired]:
        unclear = ", ".join(path for path, clear in tested if not clear)
        notes.append(f"changes that a paired test over problems does not confirm at 1 %: {unclear or 'none'}")
    return RunTable("runs", ["run", *(names[k] for k in keys), *RESULTS], body, notes)


def page_results(rows: Sequence[RunRow], known: Sequence[Label]) -> PageTable:
    groups: dict[str, list[RunRow]] = {}
    for row, one in zip(rows, known, strict=True):
        groups.setdefault(one.group, []).append(row)
    done = {group: [row for row in members if row.done] for group, members in groups.items() if len(members) > 1}
    body = [[f"{group} (mean)", len(m), *[seed_mean(m, name) for name in AVERAGED], ""] for group, m in done.items()]
    body += [
        [one.label, 1, *[row.results[name] for name in AVERAGED], row.run.state]
        for row, one in zip(rows, known, strict=True)
    ]
    notes = [
        f"final reward: the mean over the last {LAST_STEPS} steps; before, accuracy: held-out, at temperature 1",
        f"means: over the finished runs of a group, {MEANS}",
    ]
    return PageTable(["run", "runs", *AVERAGED, "state"], body, notes)


def page_differences(rows: Sequence[RunRow], known: Sequence[Label]) -> PageTable:
    """A row for each run with the keys that differ."""
    keys = differing_settings(rows)
    body = [
        [one.name, *[format_value(row.settings.get(key)) for key in keys]] for row, one in zip(rows, known, strict=True)
    ]
    return PageTable(["run", *keys], body)
