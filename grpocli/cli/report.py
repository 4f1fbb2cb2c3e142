"""`grpocli report`: a page about runs as one HTML file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from grpocli.errors import ConfigError

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
    from grpocli.report.build import Builder
    from grpocli.report.html import page_html
    from grpocli.tracking.text import clean

    data = Builder(formula_lines_of, args.completions, _progress).page(args.folders)
    if not os.access(out.parent, os.W_OK):
        raise ConfigError("cannot be written; name another file", key="--out", value=out)
    try:
        write_atomic(out, page_html(data))
    except OSError as error:
        raise ConfigError(f"{error.strerror or error}; name another file", key="--out", value=out) from error
    print(clean(str(out)))
    return 0


def formula_lines_of(run: Path) -> list[str]:
    """The objective of a run as `grpocli explain resume=RUN` prints it."""
    from grpocli.cli.hydra_app import composed
    from grpocli.explain.explanation import explanation
    from grpocli.explain.render import formula_lines
    from grpocli.launch.compose import build_run

    config = composed([f"resume={run}"], None)
    return formula_lines(explanation(build_run(config), config, []))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpocli report",
        description="Write a page about runs as one HTML file, which needs no network.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN|SWEEP", help="a run, or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="the file (report.html in the first folder)")
    parser.add_argument("--completions", type=int, metavar="N", help="about N completions (as many as fit in 6 MB)")
    return parser


def _progress(done: float, total: float, unit: str, detail: str = "") -> None:
    if total > 500 and sys.stderr.isatty():
        print(f"\r{done:,.0f} of {total:,.0f} {unit}   ", end="\n" if done >= total else "", file=sys.stderr)
