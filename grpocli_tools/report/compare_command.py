"""`grpocli compare`: print a table of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from grpocli.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Print the tables. Returns the exit code. Raises ConfigError if there are no runs."""
    from grpocli.text import one_line
    from grpocli_tools.report.comparison import FOOTER, PRINTERS, compare

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
    from grpocli.text import clean
    from grpocli_tools.report import plot
    from grpocli_tools.report.run_rows import find_runs

    if not 0 <= args.smoothing < 1:
        raise ConfigError("must be 0 (none) to below 1", key="--smoothing", value=args.smoothing)
    if args.plot:
        plot.check_target(args.plot, "--plot", plot.SUFFIXES)
    if args.curves:
        plot.check_target(args.curves, "--curves", [".csv"])
    rows = list({row.path.resolve(): row for folder in args.folders for row in find_runs(folder)}.values())
    runs = plot.run_curves(rows)
    names = None if args.metric is None else plot.chosen_metrics(runs, args.metric.split(","))
    if args.plot:
        missing = plot.plot(args.plot, runs, names or plot.chosen_metrics(runs, plot.DEFAULT_METRICS), args.smoothing)
        print(*missing, clean(f"{len(runs)} runs are drawn in {args.plot}"), sep="\n")
    if args.curves:
        print(clean(f"{plot.write_csv(args.curves, rows, runs, names):,} numbers are in {args.curves}"))
    return 0
