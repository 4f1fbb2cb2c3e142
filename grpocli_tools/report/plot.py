"""Curves of several runs as a picture for a paper, and as a CSV table."""

from __future__ import annotations

import csv
import io
import logging
import os
import statistics
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, config_errors
from grpocli.files import write_atomic
from grpocli.text import clean, shorten
from grpocli_tools.report.comparison import RunRow, labels
from grpocli_tools.report.curves import Curves, smoothed, with_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DEFAULT_METRICS = ("reward",)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which color-blind readers can distinguish; then the line style changes."""
STYLES = ("-", "--", ":", "-.")
INCHES = (3.4, 2.3)
"""The size of one plot: the width of a column of a two-column paper."""
LONGEST, LINE = 120, 54
"""Characters of a label in the legend, and of one of its lines."""
LINE_INCHES = 0.15
SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "svg.hashsalt": "grpocli",  # the same curves give the same bytes
    "text.parse_math": False,  # labels are data: `$` is a dollar
    "font.size": 8,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The curves of a run, named as in `Label`."""

    name: str
    label: str
    group: str
    seed: Any
    curves: Curves


def run_curves(rows: Sequence[RunRow]) -> list[RunCurves]:
    """The curves of runs, with the evaluations before their first and after their last step."""
    return [
        RunCurves(
            one.name,
            one.label,
            one.group,
            row.settings.get("seed"),
            with_evaluations(Curves.of(row.run.metrics), row.run.outcome),
        )
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


def check_target(path: Path, key: str, suffixes: Sequence[str]) -> None:
    """Raise ConfigError unless a file of this name, with one of these suffixes, can be written."""
    if path.suffix.lower() not in suffixes:
        raise ConfigError("has an unknown suffix", key=key, value=path, hint=f"use {', '.join(suffixes)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("is no file in a folder that exists", key=key, value=path)


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
        matplotlib.rcParams.update(SETTINGS)
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
        without_date: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        figure.savefig(out, format=kind, dpi=300, metadata=without_date)
    _write(path, out.getvalue(), "--plot")
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
    shown = textwrap.fill(shorten(shown, LONGEST), LINE)
    return f" {shown}" if shown.startswith("_") else shown


def _write(path: Path, data: str | bytes, key: str) -> None:
    with config_errors(OSError, key=key, value=path, hint="name another file"):
        write_atomic(path, data)


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


def write_csv(path: Path, rows: Sequence[RunRow], runs: Sequence[RunCurves], metrics: Sequence[str] | None) -> int:
    """Write run, label, seed, step, metric and value of each number, in full precision. Returns how many.

    metrics: None for all.
    """
    table = [
        (clean(str(row.path)), clean(run.label), run.seed, step, clean(metric), value)
        for row, run in zip(rows, runs, strict=True)
        for metric in (run.curves.metrics if metrics is None else metrics)
        for step, value in run.curves.series(metric)
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([("run", "label", "seed", "step", "metric", "value"), *table])
    _write(path, out.getvalue().encode(errors="replace"), "--curves")
    return len(table)
