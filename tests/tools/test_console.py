"""Escape sequences are removed from untrusted text only."""

from __future__ import annotations

import io
import logging

import pytest
from rich.table import Table
from rich.text import Text

from grpocli.text import clean_warnings
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


def test_warnings_without_a_log_file_are_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogRecordFactory()
    clean_warnings()
    logging.setLogRecordFactory(before)
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.makeLogRecord({"msg": "%s", "args": (HOSTILE,), "levelno": logging.WARNING}))
    assert capsys.readouterr().err == "abc[/red][red]d\n"


def test_a_librarys_own_log_handler_gets_clean_text() -> None:
    """transformers has such a handler, and quotes a model's files."""
    before, said = logging.getLogRecordFactory(), io.StringIO()
    library, handler = logging.getLogger("transformers.of_a_test"), logging.StreamHandler(said)
    library.addHandler(handler)
    library.setLevel(logging.WARNING)  # whatever other tests have set for transformers
    try:
        clean_warnings()
        library.warning("%s", HOSTILE)
    finally:
        library.removeHandler(handler)
        logging.setLogRecordFactory(before)
    assert said.getvalue() == "abc[/red][red]d\n"
