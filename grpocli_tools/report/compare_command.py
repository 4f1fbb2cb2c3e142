"""`grpocli compare`: print a table of runs, or draw their curves."""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import os
import statistics
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, config_errors
from grpocli.files import write_atomic
from grpocli.runs.sessions import as_typed
from grpocli.text import clean, one_line, shorten
from grpocli_tools.options import parser_of
from grpocli_tools.report.comparison import LAST_STEPS, RESULTS, RunRow, RunTable, compare, find_runs, labels
from grpocli_tools.report.page_data import Curves, smoothed, with_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST = 40
"""Characters of a cell."""
PIPE = 200
"""The width of a table in a file or a pipe."""
FOOTER = (
    "before, accuracy: held-out accuracy at temperature 1 before and after training; "
    f"final reward: the mean over the last {LAST_STEPS} steps"
)


def main(argv: Sequence[str]) -> int:
    args = parser_of("compare", __doc__).parse_args(argv)
    if args.plot:
        return _picture(args)
    tables = compare(args.folders, args.sort)
    PRINTERS[args.format](tables)
    if args.format in ("table", "markdown"):
        print(*(one_line(note) for table in tables for note in table.notes), FOOTER, sep="\n")
    return 0


def _picture(args: argparse.Namespace) -> int:
    if not 0 <= args.smoothing < 1:
        raise ConfigError("must be 0 (none) to below 1", key="--smoothing", value=args.smoothing)
    runs = run_curves(find_runs(args.folders))
    missing = plot(args.plot, runs, chosen_metrics(runs, args.metric.split(",")), args.smoothing)
    print(*missing, clean(f"{len(runs)} runs are drawn in {args.plot}"), sep="\n")
    return 0


def cell(value: object) -> str:
    """A value for people: three decimals, `-` for None, long texts cut, no escape sequences."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:g}"
    return shorten(one_line(as_typed(value)), LONGEST)


def print_terminal(tables: Sequence[RunTable]) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    from grpocli_tools.console import CleanConsole

    console = CleanConsole(width=None if sys.stdout.isatty() else PIPE)
    for table in tables:
        header, *body = _with_settings_in_one_cell(table)
        drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in header:
            drawn.add_column(Text(name), overflow="fold", justify="left" if name in ("run", "settings") else "right")
        for row in body:
            drawn.add_row(*map(Text, row))
        console.print(drawn)


def _with_settings_in_one_cell(table: RunTable) -> Iterator[list[str]]:
    """The header and the rows as texts: the run, its settings, the results."""
    run = [i for i, name in enumerate(table.header) if name == "run"]
    results = [i for i, name in enumerate(table.header) if name in ("runs", *RESULTS)]
    settings = [i for i in range(len(table.header)) if i not in (*run, *results)]
    yield [*(table.header[i] for i in run), "settings", *(table.header[i] for i in results)]
    for row in table.body:
        said = [f"{one_line(table.header[i])}={cell(row[i])}" for i in settings if row[i] not in (None, [])]
        yield [*(cell(row[i]) for i in run), ", ".join(said), *(cell(row[i]) for i in results)]


def print_markdown(tables: Sequence[RunTable]) -> None:
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


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which color-blind readers can distinguish; then the line style changes."""
STYLES = ("-", "--", ":", "-.")
INCHES = (3.4, 2.3)
"""The size of one plot: the width of a column of a two-column paper."""
LONGEST_LABEL, LINE = 120, 54
"""Characters of a label in the legend, and of one of its lines."""
LINE_INCHES = 0.15


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The curves of a run, named as in `Label`."""

    name: str
    label: str
    group: str
    curves: Curves


def run_curves(rows: Sequence[RunRow]) -> list[RunCurves]:
    """The curves of runs, with the evaluations before their first and after their last step."""
    return [
        RunCurves(one.name, one.label, one.group, with_evaluations(Curves.of(row.run.metrics), row.run.outcome))
        for row, one in zip(rows, labels(rows), strict=True)
    ]


def chosen_metrics(runs: Sequence[RunCurves], names: Sequence[str]) -> list[str]:
    """The metrics of these names. Raises ConfigError, with the nearest name, if no run has one."""
    known = sorted({name for run in runs for name in run.curves.metrics})
    for name in names:
        if name not in known:
            hint = nearest(name, known).removeprefix("; ") or f"there are {', '.join(known) or 'none: no step is done'}"
            raise ConfigError("no run has this metric", key="--metric", value=name, hint=hint)
    return list(names)


def plot(path: Path, runs: Sequence[RunCurves], metrics: Sequence[str], smoothing: float = 0.0) -> list[str]:
    """Write a picture with a plot for each metric. Returns a line for each metric that runs lack.

    Runs that differ only in the seed are one line, their mean, in a band from their minimum to their maximum.
    smoothing: the weight of the past in an exponential moving average of each run, 0 to below 1.
    """
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks
        matplotlib.rcdefaults()  # not the user's own style
        matplotlib.rcParams.update(matplotlib.rc_params_from_file(Path(__file__).with_name("paper.mplstyle")))
        entries = [_plain(group) for group in _groups(runs)]
        lines = sum(entry.count("\n") + 1 for entry in entries) if len(entries) > 1 else 0
        size = (INCHES[0], INCHES[1] * len(metrics) + LINE_INCHES * lines)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(metrics), 1, squeeze=False, sharex=True)[:, 0]
        for axes, metric in zip(panels, metrics, strict=True):
            _draw(axes, runs, metric, smoothing)
        panels[-1].set_xlabel("step")
        _legend(figure, runs, smoothing)
        out = io.BytesIO()
        kind = path.suffix.lower().removeprefix(".")
        without_date: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
        with config_errors(ValueError, key="--plot", value=path):  # of another suffix
            figure.savefig(out, format=kind, dpi=300, metadata=without_date)
    with config_errors(OSError, key="--plot", value=path, hint="name another file"):
        write_atomic(path, out.getvalue())
    return [
        f"without {metric}: {clean(', '.join(lacking))}"
        for metric in metrics
        if (lacking := [run.name for run in runs if not run.curves.series(metric)])
    ]


def _matplotlib() -> Any:
    """matplotlib without a window and without messages about its caches; it finds a folder for them itself."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook's, say, may not be installed here
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    return matplotlib


def _draw(axes: Axes, runs: Sequence[RunCurves], metric: str, smoothing: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, (group, members) in enumerate(_groups(runs).items()):
        series = [smoothed(one.curves.series(metric), smoothing) for one in members]
        points = mean_and_range([one for one in series if one])
        if not points:
            continue
        steps, means, lows, highs = zip(*points, strict=True)
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        marker = "o" if len(steps) <= 12 else None
        axes.plot(steps, means, style, color=color, linewidth=1.2, marker=marker, markersize=2.5, label=_plain(group))
        if len(members) > 1:
            axes.fill_between(steps, lows, highs, color=color, alpha=0.2, linewidth=0)
    axes.set_ylabel(_plain(metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)


def _legend(figure: Figure, runs: Sequence[RunCurves], smoothing: float) -> None:
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if len(handles) > 1:
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=1)
    seeds = [len(members) for members in _groups(runs).values()]
    count = f"{min(seeds)} to {max(seeds)}" if min(seeds) < max(seeds) else f"{max(seeds)}"
    notes = [f"mean of {count} seeds; band: minimum to maximum"] if max(seeds) > 1 else []
    notes += [f"moving average, weight {smoothing:g}"] if smoothing else []
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=6, color="0.35")


def _plain(text: str) -> str:
    """A label for the picture, on several lines if it is long. A leading underscore would hide it."""
    shown = clean(text)
    shown = textwrap.fill(shorten(shown, LONGEST_LABEL), LINE)
    return f" {shown}" if shown.startswith("_") else shown


def _groups(runs: Sequence[RunCurves]) -> dict[str, list[RunCurves]]:
    groups: dict[str, list[RunCurves]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def mean_and_range(series: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float, float, float]]:
    """(step, mean, minimum, maximum) over the series that have the step."""
    values: dict[int, list[float]] = {}
    for one in series:
        for step, value in one:
            values.setdefault(step, []).append(value)
    return [(step, statistics.fmean(found), min(found), max(found)) for step, found in sorted(values.items())]
