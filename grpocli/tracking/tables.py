"""Printing a table for a terminal, a document, a spreadsheet or a program."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpocli.tracking.text import clean, one_line

LONGEST = 40


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are numbers, texts, lists, or None where there is nothing. notes: sentences about some of them."""

    title: str
    header: list[str]
    body: list[list[Any]]
    notes: list[str] = field(default_factory=list)


def cell(value: Any) -> str:
    """A value for people: three decimals, `-` for nothing, long texts cut, no escape sequences."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:g}"
    text = one_line(str(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def print_terminal(tables: Sequence[Table]) -> None:
    """Tables as rich draws them; not wrapped where the output is a file or a pipe."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    from grpocli.tracking.console import CleanConsole

    console = CleanConsole(width=None if sys.stdout.isatty() else 1000)
    for table in tables:
        drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, column in enumerate(table.header):
            numeric = all(isinstance(row[i], int | float | None) for row in table.body)
            drawn.add_column(Text(one_line(column)), overflow="fold", justify="right" if numeric else "left")
        for row in table.body:
            drawn.add_row(*[Text(cell(value)) for value in row])
        console.print(drawn)


def print_markdown(tables: Sequence[Table]) -> None:
    """GitHub's tables, one below the other."""
    for table in tables:
        header, *body = ([cell(value).replace("|", "\\|") for value in row] for row in (table.header, *table.body))
        lines = [header, ["---"] * len(header), *body]
        print(f"**{table.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")


def print_csv(tables: Sequence[Table]) -> None:
    """The first table, in full precision."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for row in (tables[0].header, *tables[0].body):
        writer.writerow([clean(value) if isinstance(value, str) else value for value in row])


def print_json(tables: Sequence[Table]) -> None:
    """The first table, an object a row, in full precision."""
    table = tables[0]
    print(json.dumps([dict(zip(table.header, row, strict=True)) for row in table.body], indent=2, default=str))


PRINTERS: dict[str, Callable[[Sequence[Table]], None]] = {
    "table": print_terminal,
    "markdown": print_markdown,
    "csv": print_csv,
    "json": print_json,
}
