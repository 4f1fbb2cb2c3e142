"""`grpocli report`: write a page about runs: curves, warnings, completions."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpocli.errors import config_errors
from grpocli_tools.options import parser_of


def main(argv: Sequence[str]) -> int:
    args = parser_of("report", __doc__).parse_args(argv)
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


def _progress(done: float, total: float, unit: str, detail: str = "") -> None:
    if total > 500 and sys.stderr.isatty():
        print(f"\r{done:,.0f} of {total:,.0f} {unit}   ", end="\n" if done >= total else "", file=sys.stderr)
