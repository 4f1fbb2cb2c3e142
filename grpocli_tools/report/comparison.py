"""Tables of the runs below some folders, and of their means over seeds."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.runs.saved_run import GROUPS
from grpocli.runs.sessions import as_typed
from grpocli.text import clean, one_line
from grpocli_tools.evaluation.significance import MEANS, mean_text
from grpocli_tools.report.run_rows import LAST_STEPS, RESULTS, RunRow, find_runs

LONGEST = 40
"""Characters of a cell."""
IGNORED = ("resume", "resume_other_weights", "tracker", "hydra", "name")
PIPE = 200
"""The width of a table in a file or a pipe."""
OWN_WIDTH = 24
"""Characters of the column of runs that settings leave free."""
FOOTER = (
    "before, accuracy: held-out accuracy at temperature 1 before and after training; "
    f"final reward: the mean over the last {LAST_STEPS} steps"
)
AVERAGED = ("before", "accuracy", "change", "final reward", "seconds")


@dataclass(frozen=True, slots=True)
class RunTable:
    """A table to print. Cells are numbers, texts, lists or None. notes: sentences printed below it."""

    title: str
    header: list[str]
    body: list[list[Any]]
    notes: list[str] = field(default_factory=list)


def compare(folders: Sequence[Path], sort: str = "accuracy") -> list[RunTable]:
    """A table of the runs, best first, and a table of means over seeds if there are several seeds."""
    rows = list({row.path.resolve(): row for folder in folders for row in find_runs(folder)}.values())
    if not rows:
        raise ConfigError(f"there is no run below {', '.join(map(str, folders))}: no folder there has a config.yaml")
    if sort != "path":
        rows.sort(key=lambda row: (row.results[sort] is None, -(row.results[sort] or 0.0)))
    keys = differing_settings(rows)
    names = short_names(keys, rows)
    tables = [_run_table(rows, keys, names)]
    others = [key for key in keys if key != "seed"]
    if "seed" in keys and any(len(group) > 1 for group in _group_by(rows, others).values()):
        tables.append(_seed_means(rows, others, names))
    return tables


def differing_settings(rows: Sequence[RunRow]) -> list[str]:
    """The keys that distinguish the runs, without the many keys that follow from a choice.

    In this order: choices of config groups; keys given on a command line; keys that differ between runs that are equal
    in all of these (if a command line is unknown: equal in the groups above the key).
    """
    readable = [row for row in rows if row.configured] or rows
    keys = dict.fromkeys(key for row in readable for key in row.settings)
    differ = [k for k in keys if k.split(".")[0] not in IGNORED and _values(readable, k) > 1]
    typed = {key for row in readable for key in row.typed or []}
    chosen = [k for k in (*GROUPS, "reward") if k in differ]
    chosen += [k for k in differ if k in typed and k not in chosen and k != "seed"]
    seed = ["seed"] if "seed" in differ else []
    all_typed = all(row.typed is not None for row in readable)
    rest = sorted((k for k in differ if k not in (*chosen, *seed)), key=lambda k: ("/" not in k, k))
    for key in rest:
        above = [*chosen, *seed] if all_typed else [k for k in chosen if _is_above(k, key)]
        if any(_values(group, key) > 1 for group in _group_by(readable, above).values()):
            chosen.append(key)
    return chosen + seed


def _is_above(group: str, key: str) -> bool:
    path = group.replace("/", ".")
    return group == "recipe" or key.replace("/", ".").startswith(f"{path}.")


def _values(rows: Sequence[RunRow], key: str) -> int:
    return len({str(row.settings.get(key)) for row in rows})


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


def _run_table(rows: Sequence[RunRow], keys: Sequence[str], names: dict[str, str]) -> RunTable:
    body = [[_short_path(row, rows), *[row.settings.get(k) for k in keys], *row.results.values()] for row in rows]
    notes = [f"{_short_path(row, rows)} has no change: {row.incomparable}" for row in rows if row.incomparable]
    tested = [row for row in rows if row.paired]
    unclear = [_short_path(row, rows) for row in tested if row.paired and not row.paired.clear]
    if tested:
        notes.append(
            f"changes that a paired test over problems does not confirm at 1 %: {', '.join(unclear) or 'none'}"
        )
    return RunTable("runs", ["run", *(names[k] for k in keys), *RESULTS], body, notes)


def _group_by(rows: Sequence[RunRow], keys: Sequence[str]) -> dict[tuple[str, ...], list[RunRow]]:
    groups: dict[tuple[str, ...], list[RunRow]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.settings.get(k)) for k in keys), []).append(row)
    return groups


def _seed_means(rows: Sequence[RunRow], keys: Sequence[str], names: dict[str, str]) -> RunTable:
    """Means over the finished runs, with 95 % t intervals."""
    groups = _group_by([row for row in rows if row.done], keys).values()
    body = [
        [*[group[0].settings.get(k) for k in keys], len(group), *[seed_mean(group, result) for result in AVERAGED]]
        for group in groups
    ]
    return RunTable(f"means over seeds ({MEANS})", [*(names[k] for k in keys), "runs", *AVERAGED], body)


def seed_mean(rows: Sequence[RunRow], result: str) -> Any:
    """The mean of a result with its interval, the only value, or None."""
    numbers = [row.results[result] for row in rows if row.results[result] is not None]
    if len(numbers) < 2:
        return numbers[0] if numbers else None
    return mean_text(numbers, 1 if result == "seconds" else 3)


def _short_path(row: RunRow, rows: Sequence[RunRow]) -> str:
    """The path of a run below the folder that all runs share, after the name that its config may give it."""
    paths = [other.path.resolve() for other in rows]
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
    path, name = str(row.path.resolve().relative_to(common)), row.settings.get("name")
    return f"{name} ({path})" if name else path


def cell(value: Any) -> str:
    """A value for people: three decimals, `-` for None, long texts cut, no escape sequences."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:g}"
    text = one_line(as_typed(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def print_terminal(tables: Sequence[RunTable]) -> None:
    """Print tables with rich: results first, then the settings that fit; below them the others of each row."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    from grpocli_tools.console import CleanConsole

    console = CleanConsole(width=None if sys.stdout.isatty() else PIPE)
    for table in tables:
        columns, rest = _fitting(table, console.width)
        drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i in columns:
            numeric = all(isinstance(row[i], int | float | None) for row in table.body)
            name, side = Text(one_line(table.header[i])), "right" if numeric else "left"
            drawn.add_column(name, overflow="fold", no_wrap=numeric, justify=side)  # type: ignore[arg-type]
        for row in table.body:
            drawn.add_row(*[Text(cell(row[i])) for i in columns])
        console.print(drawn)
        for number, row in enumerate(table.body, 1):
            if known := [f"{table.header[i]}={cell(row[i])}" for i in rest if row[i] not in (None, [])]:
                own = cell(row[0]) if table.header[0] == "run" else f"row {number}"
                console.print(Text(f"{own}: {', '.join(known)}"))


def _fitting(table: RunTable, width: int) -> tuple[list[int], list[int]]:
    """The columns that fit: run, results, then settings in order; and the settings that do not."""
    cells = zip(table.header, *table.body, strict=True)
    widths = [max(len(cell(value)) for value in column) + 3 for column in cells]  # with padding and a line
    named = table.header[0] == "run"
    widths[0] = min(widths[0], OWN_WIDTH) if named else widths[0]
    first = [i for i, name in enumerate(table.header) if name in ("run", "runs", *RESULTS)]
    settings = [i for i in range(len(table.header)) if i not in first]
    room = width - sum(widths[i] for i in first)
    fitting = [i for place, i in enumerate(settings) if sum(widths[j] for j in settings[: place + 1]) <= room]
    columns = [*first, *fitting] if named or len(fitting) < len(settings) else list(range(len(widths)))
    return columns, settings[len(fitting) :]


def print_markdown(tables: Sequence[RunTable]) -> None:
    """Print tables as GitHub Markdown."""
    for table in tables:
        header, *body = ([cell(value).replace("|", "\\|") for value in row] for row in (table.header, *table.body))
        lines = [header, ["---"] * len(header), *body]
        print(f"**{table.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")


def print_csv(tables: Sequence[RunTable]) -> None:
    """Print the first table as CSV, in full precision."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for row in (tables[0].header, *tables[0].body):
        writer.writerow([clean(value) if isinstance(value, str) else value for value in row])


def print_json(tables: Sequence[RunTable]) -> None:
    """Print the first table as a JSON list of one object per row, in full precision."""
    table = tables[0]
    print(json.dumps([dict(zip(table.header, row, strict=True)) for row in table.body], indent=2, default=str))


PRINTERS: dict[str, Callable[[Sequence[RunTable]], None]] = {
    "table": print_terminal,
    "markdown": print_markdown,
    "csv": print_csv,
    "json": print_json,
}
