"""An explanation, or two compared, on a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpocli.explain.compare import Comparison
from grpocli.explain.compose import Explanation, Section
from grpocli.explain.layout import LABEL, section_lines, settings_line, source_rows, symbol_rows, unused_line
from grpocli.tracking.console import CleanConsole

WIDEST = 120


def explanation_text(shown: Explanation) -> str:
    """The formulas, then symbols with their keys, and where it all is from."""
    out = _console()
    with out.capture() as captured:
        out.print(Text(f"grpocli explain {shown.title}".rstrip(), style="bold"))
        for section in shown.sections:
            out.print()
            _section(out, section)
        _table(out, ["symbol", "key", "value", "meaning"], symbol_rows(shown.symbols))
        _paragraph(out, "other keys", settings_line(shown.settings))
        _paragraph(out, "not in use", unused_line(shown.unused))
        _table(out, ["of", "source"], source_rows(shown.sections))
    return _trimmed(captured.get())


def comparison_text(found: Comparison) -> str:
    """Only what differs."""
    out = _console()
    with out.capture() as captured:
        for title in found.titles:
            out.print(Text(title, style="bold"))
        for pair in found.sections:
            out.print()
            for line in pair.lines():
                out.print(Text(line), soft_wrap=True)
        if found.verdict:
            out.print(f"\n{found.verdict}")
        _table(out, ["key", "left", "right"], found.keys)
    return _trimmed(captured.get())


def _console() -> CleanConsole:
    """As wide as the terminal, within reason; neither style nor escape codes where there is none."""
    plain = CleanConsole()
    return CleanConsole(width=min(plain.width, WIDEST) if sys.stdout.isatty() else WIDEST)


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def _section(out: CleanConsole, section: Section) -> None:
    for number, line in enumerate(section_lines(section)):
        text = Text(line)
        text.stylize("bold" if number == 0 else "dim", 0, LABEL)
        out.print(text, soft_wrap=True)


def _table(out: CleanConsole, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in header:
        drawn.add_column(column, overflow="fold", no_wrap=column in ("symbol", "key", "of"))
    for row in rows:
        drawn.add_row(*[Text(cell) for cell in row])
    out.print()
    out.print(drawn)


def _paragraph(out: CleanConsole, label: str, text: str) -> None:
    if text:
        out.print()
        out.print(Text(label, style="bold"))
        out.print(Padding(Text(text), (0, 0, 0, 2)))
