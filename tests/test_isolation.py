"""Tests do not affect later tests of the same process."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
from isolation import isolated

from grpocli.config.parts import ESCAPED, is_marked, stored
from grpocli.config.user_code import check_exists, load
from grpocli.errors import ConfigError

PART = """\
from grpocli.config.parts import Escaped, part

@part("algorithm/advantage", "left_behind")
class LeftBehind:
    text: Escaped = ""

    def __call__(self, rewards): return rewards
"""


def test_user_code_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"  # which is not the working directory
    folder.mkdir()
    (folder / "left_behind.py").write_text(PART)
    path, modules = list(sys.path), set(sys.modules)
    for _ in range(2):
        with isolated(tmp_path):
            load(f"{folder}/left_behind.py:LeftBehind", "algorithm/advantage")
            check_exists("left_behind:LeftBehind", "algorithm/advantage")
            assert "left_behind" in stored("algorithm/advantage")
            assert is_marked("algorithm.advantage.text", ESCAPED)
        assert sys.path == path
        assert not [name for name in set(sys.modules) - modules if "left_behind" in name]
        assert "left_behind" not in stored("algorithm/advantage")
        assert not is_marked("algorithm.advantage.text", ESCAPED)
        with pytest.raises(ConfigError, match="No module named 'left_behind'"):
            check_exists("left_behind:LeftBehind", "algorithm/advantage")


def test_process_state_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOVED", "1")
    monkeypatch.setenv("CHANGED", "1")
    before, folder, argv, level = dict(os.environ), Path.cwd(), sys.argv, logging.root.level
    with isolated(tmp_path):
        os.environ.pop("REMOVED")
        os.environ.update(CHANGED="2", ADDED="3")
        os.chdir(tmp_path)
        sys.argv = ["grpocli train"]
        logging.root.setLevel(level + 1)
    assert (dict(os.environ), Path.cwd(), sys.argv, logging.root.level) == (before, folder, argv, level)
