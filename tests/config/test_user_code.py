"""Imports of user code can neither end the process nor return in a forked copy of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpocli.config.user_code import load
from grpocli.errors import ConfigError


@pytest.mark.parametrize("leave", ["os._exit(0)", "os.execlp('true', 'true')"])
def test_an_import_does_not_end_the_process(tmp_path: Path, leave: str) -> None:
    (tmp_path / "mine.py").write_text(f"import os\n{leave}\n")
    with pytest.raises(ConfigError, match=r"importing it raised SystemExit: .* would have ended the run"):
        load(f"{tmp_path}/mine.py:score", "reward.python.function")


@pytest.mark.processes
def test_a_fork_at_import_returns_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos.fork()\ndef score(): ...\n")
    code = f"from grpocli.config.user_code import load\nload('{tmp_path}/mine.py:score', 'key')\nprint('here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "here\n"
    assert "mine.py forked a process that returned from it; grpocli ended that process" in done.stderr
