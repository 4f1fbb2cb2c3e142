"""Escape sequences are removed from untrusted text only; long output goes to a pager, tested in a pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from grpocli_tools.console import CleanConsole

SCRIPT = """
from grpocli_tools.console import paged
with paged() as console:
    for k in range(LINES):
        console.print(f"line {k}", style="dim", highlight=False)
print("after")
"""


def screen(lines: int, **env: str) -> str:
    """The terminal output of a program that pages `lines` lines, with q pressed."""
    user, terminal = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("PAGER", "LESS", "LESSCHARSET")}
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("LINES", str(lines))],
        env={**clean, "TERM": "xterm", **env},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    os.write(user, b"q")
    shown = b""
    try:
        while piece := os.read(user, 65536):
            shown += piece
    except OSError:  # the end of a pseudo-terminal on Linux
        pass
    os.close(user)
    assert program.wait(timeout=60) == 0
    return shown.decode()


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("less"), reason="less is not installed")
def test_less_shows_styles_and_no_escape_codes_as_text() -> None:
    shown = screen(3)
    assert "ESC" not in shown
    assert "\x1b[2mline 2\x1b[0m" in shown
    assert shown.rstrip().endswith("after")


@pytest.mark.processes
def test_another_pager_gets_plain_text_and_may_be_missing_or_quit_early(tmp_path: Path) -> None:
    (tmp_path / "pager").write_text(f"#!/bin/sh\ncat > {tmp_path}/seen\n")
    (tmp_path / "pager").chmod(0o755)
    screen(3, PAGER=str(tmp_path / "pager"))
    assert (tmp_path / "seen").read_text() == "line 0\nline 1\nline 2\n"
    for pager in ("/nowhere/pager", "head -1"):
        shown = screen(5000, PAGER=pager)
        assert (shown.rstrip().endswith("after"), "Traceback" in shown) == (True, False)


HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9bb\u202ec[/red][red]d"


def printed(thing: object) -> str:
    out = io.StringIO()
    CleanConsole(file=out, force_terminal=True, color_system="standard", width=80).print(thing)
    return out.getvalue()


def test_own_colours_are_kept_and_cells_and_headings_are_cleaned() -> None:
    assert printed(Text(HOSTILE, style="red")) == "\x1b[31mabc[/red][red]d\x1b[0m\n"
    table = Table(HOSTILE)
    table.add_row(HOSTILE, end_section=True)
    out = printed(table)
    assert out.count("abc[/red][red]d") == 2
    assert not {"\x07", "\x9b", "\u202e"} & set(out)
    assert "\x1b]" not in out
    assert "\x1b[2J" not in out
