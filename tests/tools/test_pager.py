"""Long output in a pager, tested in a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_another_pager_gets_plain_text(tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {tmp_path}/seen\n")
    pager.chmod(0o755)
    screen(3, PAGER=str(pager))
    assert (tmp_path / "seen").read_text() == "line 0\nline 1\nline 2\n"


@pytest.mark.processes
@pytest.mark.parametrize("pager", ["/nowhere/pager", "head -1"])
def test_a_pager_that_is_missing_or_quits_early(pager: str) -> None:
    shown = screen(5000, PAGER=pager)
    assert shown.rstrip().endswith("after")
    assert "Traceback" not in shown
