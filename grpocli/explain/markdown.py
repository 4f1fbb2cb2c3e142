"""An explanation, or two compared, as GitHub-flavoured Markdown: formulas in code blocks, the rest in tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpocli.explain.compare import Comparison
from grpocli.explain.compose import Explanation
from grpocli.explain.layout import formula_lines, settings_line, source_rows, symbol_rows, unused_line


def explanation_markdown(shown: Explanation) -> str:
    """The formulas, then symbols with their keys, and where it all is from."""
    return "\n".join(
        [
            f"`grpocli explain {shown.title}`" if shown.title else "`grpocli explain`",
            "",
            *code(formula_lines(shown)),
            *table(["symbol", "key", "value", "meaning"], _keys(symbol_rows(shown.symbols), 1)),
            *([f"Other keys: `{settings_line(shown.settings)}`.", ""] if shown.settings else []),
            *([f"Not in use: {unused_line(shown.unused)}.", ""] if shown.unused else []),
            *table(["of", "source"], source_rows(shown.sections)),
        ]
    )


def comparison_markdown(found: Comparison) -> str:
    """Only what differs."""
    lines = [line for pair in found.sections for line in (*pair.lines(), "")]
    return "\n".join(
        [
            *code(found.titles),
            *([f"{found.verdict[0].upper()}{found.verdict[1:]}.", ""] if found.verdict else []),
            *(code(lines[:-1]) if lines else []),
            *table(["key", "left", "right"], _keys(found.keys, 0)),
        ]
    )


def code(lines: Sequence[str], language: str = "text") -> Iterator[str]:
    """A fenced block and a blank line."""
    yield from (f"```{language}", *lines, "```", "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table and a blank line; nothing where there are no rows."""
    if not rows:
        return
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _keys(rows: Sequence[Sequence[str]], column: int) -> list[list[str]]:
    """With one column as code."""
    return [[f"`{cell}`" if i == column else cell for i, cell in enumerate(row)] for row in rows]
