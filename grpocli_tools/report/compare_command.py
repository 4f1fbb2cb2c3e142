"""`grpocli compare`: print a table of runs, or draw and export their curves."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from grpocli.errors import ConfigError
from grpocli.runs.sessions import as_typed
from grpocli.text import clean, one_line, shorten
from grpocli_tools.report.comparison import LAST_STEPS, RESULTS, RunTable, compare, find_runs

LONGEST = 40
"""Characters of a cell."""
PIPE = 200
"""The width of a table in a file or a pipe."""
OWN_WIDTH = 24
"""Characters of the column of runs that settings leave free."""
FOOTER = (
    "before, accuracy: held-out accuracy at temperature 1 before and after training; "
    f"final reward: the mean over the last {LAST_STEPS} steps"
)


def main(argv: Sequence[str]) -> int:
    """Print the tables. Returns the exit code. Raises ConfigError if there are no runs."""
    parser = argparse.ArgumentParser(
        prog="grpocli compare",
        description="Print a table of the runs below some folders, and of their means over seeds. --plot and --curves "
        "write their curves instead.",
        epilog=FOOTER,
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, a sweep, or any folder of runs")
    parser.add_argument("--format", choices=sorted(PRINTERS), default="table", help="the format of the output (table)")
    parser.add_argument(
        "--sort",
        choices=["accuracy", "change", "final reward", "path"],
        default="accuracy",
        help="the order (accuracy)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw curves over steps: FILE.png, .svg or .pdf")
    parser.add_argument("--curves", type=Path, metavar="FILE.csv", help="export curves, a row for each number")
    parser.add_argument("--metric", metavar="NAME[,NAME]", help="the metrics to draw (reward) or to export (all)")
    parser.add_argument("--smoothing", type=float, default=0.0, metavar="W", help="of --plot: 0 (none) to below 1")
    args = parser.parse_args(argv)
    if args.plot or args.curves:
        return _curves(args)
    tables = compare(args.folders, args.sort)
    PRINTERS[args.format](tables)
    if args.format in ("table", "markdown"):
        print(*(one_line(note) for table in tables for note in table.notes), FOOTER, sep="\n")
    return 0


def _curves(args: argparse.Namespace) -> int:
    """Draw and export curves."""
    from grpocli_tools.report import plot

    if not 0 <= args.smoothing < 1:
        raise ConfigError("must be 0 (none) to below 1", key="--smoothing", value=args.smoothing)
    for path, key, suffixes in ((args.plot, "--plot", plot.SUFFIXES), (args.curves, "--curves", (".csv",))):
        if path:
            plot.check_target(path, key, suffixes)
    rows = find_runs(args.folders)
    runs = plot.run_curves(rows)
    names = None if args.metric is None else plot.chosen_metrics(runs, args.metric.split(","))
    if args.plot:
        missing = plot.plot(args.plot, runs, names or plot.chosen_metrics(runs, plot.DEFAULT_METRICS), args.smoothing)
        print(*missing, clean(f"{len(runs)} runs are drawn in {args.plot}"), sep="\n")
    if args.curves:
        print(clean(f"{plot.write_csv(args.curves, rows, runs, names):,} numbers are in {args.curves}"))
    return 0


def cell(value: object) -> str:
    """A value for people: three decimals, `-` for None, long texts cut, no escape sequences."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:g}"
    return shorten(one_line(as_typed(value)), LONGEST)


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
