"""Running `grpocli plan` as a user does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def grpocli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; the exit code, and what it printed to stdout and stderr."""
    from grpocli.cli import main

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(list(argv))
        said = capsys.readouterr()
        return int(exit_.value.code or 0), said.out, said.err

    return run
