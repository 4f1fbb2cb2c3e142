"""`grpocli report`: write a page about runs: curves, warnings, completions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpocli.cli import plain_parser
from grpocli.errors import ConfigError, config_errors

EXAMPLES = """\
examples
  grpocli report runs/DATE/TIME                   one run: curves, warnings, completions
  grpocli report multirun/DATE/TIME               a sweep: curves over seeds, results, differences
  grpocli report RUN RUN --out compared.html
"""


def main(argv: Sequence[str]) -> int:
    """Write the page. Returns the exit code. Raises ConfigError for a folder without runs or a file that fails."""
    args = _parser().parse_args(argv)
    if args.completions is not None and args.completions < 0:
        raise ConfigError("must be 0 or more", key="--completions", value=args.completions)
    out = args.out or args.folders[0] / "report.html"
    from grpocli.files import write_atomic
    from grpocli.text import clean
    from grpocli_tools.report.report_page import report_page

    html = report_page(args.folders, args.completions, _progress)
    hint = "name another file with --out FILE.html"
    with config_errors(OSError, says="the page cannot be written: {}", key="--out", value=out, hint=hint):
        write_atomic(out, html)
    print(clean(str(out)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = plain_parser("report", "Write a page about runs as one HTML file, which needs no network.", EXAMPLES)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN|SWEEP", help="a run, or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="the file (report.html in the first folder)")
    parser.add_argument("--completions", type=int, metavar="N", help="about N completions (as many as fit in 6 MB)")
    return parser


def _progress(done: float, total: float, unit: str, detail: str = "") -> None:
    if total > 500 and sys.stderr.isatty():
        print(f"\r{done:,.0f} of {total:,.0f} {unit}   ", end="\n" if done >= total else "", file=sys.stderr)
