"""`grpocli compare`: print a table of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Print the tables. Returns the exit code. Raises ConfigError if there are no runs."""
    from grpocli.tracking.compare import FOOTER, PRINTERS, compare
    from grpocli.tracking.text import one_line

    parser = argparse.ArgumentParser(
        prog="grpocli compare",
        description="Print a table of the runs below some folders, and of their means over seeds.",
        epilog=FOOTER,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, a sweep, or any folder of runs")
    parser.add_argument("--format", choices=sorted(PRINTERS), default="table", help="the format of the output (table)")
    parser.add_argument(
        "--sort",
        choices=["accuracy", "change", "final reward", "path"],
        default="accuracy",
        help="the order (accuracy)",
    )
    args = parser.parse_args(argv)
    tables = compare(args.folders, args.sort)
    PRINTERS[args.format](tables)
    if args.format in ("table", "markdown"):
        print(*(one_line(note) for table in tables for note in table.notes), FOOTER, sep="\n")
    return 0
