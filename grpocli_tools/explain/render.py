"""An explanation, or a comparison of two, as text and as GitHub-flavoured Markdown."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpocli_tools.console import CleanConsole
from grpocli_tools.explain.explanation import ABSENT, Comparison, Explanation, Pair, Section, Symbol, formulas

LABEL = 18  # the longest name of a choice, normalize_then_sum
WIDTH = 80
WIDEST = 120
"""Columns of tables if the output is not a terminal, and the maximum on a terminal."""


def section_lines(section: Section) -> list[str]:
    """Label and choice in the left column, formulas and note in the right one."""
    left = [section.label, *filter(None, [section.choice])]
    rows = zip_longest(left, right_lines(section), fillvalue="")
    return [f"{a:<{LABEL}} {b}".rstrip() for a, b in rows]


def right_lines(section: Section) -> list[str]:
    """The formulas and the note, wrapped to the right column."""
    return [line for text in (*section.lines, section.note) for line in wrapped(text)]


def pair_lines(pair: Pair) -> Iterator[str]:
    """The left side's formulas above the right side's, without those that both sides have."""
    yield pair.label
    left, right = formulas(pair.left), formulas(pair.right)
    for side, own, other in (("left", left, right), ("right", right, left)):
        name = f"  {side}"
        for text in [text for text in own if text not in other] or [ABSENT]:
            for line in wrapped(text):
                yield f"{name:<{LABEL}} {line}"
                name = ""


def formula_lines(shown: Explanation) -> list[str]:
    """The whole objective, a blank line between sections."""
    blocks = [section_lines(section) for section in shown.sections]
    return [line for block in blocks for line in (*block, "")][:-1]


def other_lines(shown: Explanation) -> tuple[str, str]:
    """The keys that are no symbols, and a clause for each unused part: `tokens all (every token ...)`."""
    settings = ", ".join(f"{key}={value}" for key, value in shown.settings)
    return settings, "; ".join(f"{s.label} {s.choice} ({s.note.rstrip('.')})" for s in shown.unused)


def source_rows(sections: Sequence[Section]) -> list[list[str]]:
    return [[f"{s.label} {s.choice}".strip(), source] for s in sections for source in s.source]


def symbol_rows(symbols: Iterable[Symbol]) -> list[list[str]]:
    return [[s.name, s.key, s.value, s.meaning] for s in symbols]


def wrapped(text: str) -> list[str]:
    room = WIDTH - LABEL - 1
    if len(text) <= room:
        return [text] if text else []
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


def explanation_text(shown: Explanation) -> str:
    """The formulas, then the symbols with their keys, and the sources."""
    out = _console()
    with out.capture() as captured:
        out.print(Text(f"grpocli explain {shown.title}".rstrip(), style="bold"))
        for section in shown.sections:
            out.print()
            for number, line in enumerate(section_lines(section)):
                text = Text(line)
                text.stylize("bold" if number == 0 else "dim", 0, LABEL)
                out.print(text, soft_wrap=True)
        _table(out, ["symbol", "key", "value", "meaning"], symbol_rows(shown.symbols))
        for label, others in zip(("other keys", "not in use"), other_lines(shown), strict=True):
            if others:
                out.print()
                out.print(Text(label, style="bold"))
                out.print(Padding(Text(others), (0, 0, 0, 2)))
        _table(out, ["part", "source"], source_rows(shown.sections))
    return _trimmed(captured.get())


def comparison_text(found: Comparison) -> str:
    out = _console()
    with out.capture() as captured:
        for title in found.titles:
            out.print(Text(title, style="bold"))
        if found.sections:
            out.print("lines that both have are left out")
        for pair in found.sections:
            out.print()
            for line in pair_lines(pair):
                out.print(Text(line), soft_wrap=True)
        if found.verdict:
            out.print(f"\n{found.verdict}")
        _table(out, ["key", "left", "right"], found.keys)
    return _trimmed(captured.get())


def _console() -> CleanConsole:
    """A console as wide as the terminal, up to WIDEST; without styles if the output is not a terminal."""
    plain = CleanConsole()
    return CleanConsole(width=min(plain.width, WIDEST) if sys.stdout.isatty() else WIDEST)


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def _table(out: CleanConsole, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in header:
        drawn.add_column(column, overflow="fold", no_wrap=column in ("symbol", "key", "part"))
    for row in rows:
        drawn.add_row(*[Text(cell) for cell in row])
    out.print()
    out.print(drawn)


def explanation_markdown(shown: Explanation) -> str:
    settings, unused = other_lines(shown)
    return "\n".join(
        [
            f"`grpocli explain {shown.title}`" if shown.title else "`grpocli explain`",
            "",
            *code(formula_lines(shown)),
            *table(["symbol", "key", "value", "meaning"], _keys(symbol_rows(shown.symbols), 1)),
            *([f"Other keys: `{settings}`.", ""] if settings else []),
            *([f"Not in use: {unused}.", ""] if unused else []),
            *table(["part", "source"], source_rows(shown.sections)),
        ]
    )


def comparison_markdown(found: Comparison) -> str:
    lines = [line for pair in found.sections for line in (*pair_lines(pair), "")]
    return "\n".join(
        [
            *code(found.titles),
            *([f"{found.verdict[0].upper()}{found.verdict[1:]}.", ""] if found.verdict else []),
            *(code(lines[:-1]) if lines else []),
            *table(["key", "left", "right"], _keys(found.keys, 0)),
        ]
    )


def code(lines: Sequence[str], language: str = "text") -> Iterator[str]:
    yield from (f"```{language}", *lines, "```", "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _keys(rows: Sequence[Sequence[str]], column: int) -> list[list[str]]:
    return [[f"`{cell}`" if i == column else cell for i, cell in enumerate(row)] for row in rows]
