"""Escape sequences are removed from untrusted text only."""

from __future__ import annotations

import io

from rich.table import Table
from rich.text import Text

from grpocli_tools.console import CleanConsole

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9bb\u202ec[/red][red]d"


def printed(thing: object) -> str:
    out = io.StringIO()
    CleanConsole(file=out, force_terminal=True, color_system="standard", width=80).print(thing)
    return out.getvalue()


def test_the_consoles_own_colours_are_kept() -> None:
    assert printed(Text(HOSTILE, style="red")) == "\x1b[31mabc[/red][red]d\x1b[0m\n"


def test_cells_and_headings_are_cleaned() -> None:
    table = Table(HOSTILE)
    table.add_row(HOSTILE, end_section=True)
    out = printed(table)
    assert out.count("abc[/red][red]d") == 2
    assert not {"\x07", "\x9b", "\u202e"} & set(out)
    assert "\x1b]" not in out
    assert "\x1b[2J" not in out
