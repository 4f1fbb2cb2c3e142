"""The configs of the page "Your first real run" compose."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from grpocli.cli import COMMANDS
from grpocli.cli.hydra_app import composed

PAGE = Path(__file__).parents[2] / "docs" / "first_run.md"
LINES = [shlex.split(line)[1:] for line in PAGE.read_text().splitlines() if line.startswith("    grpocli ")]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_of_the_page_exists_and_its_config_composes(words: list[str]) -> None:
    assert words[0] in COMMANDS
    overrides = [word for word in words[1:] if "=" in word and not word.startswith(("resume=", "hydra."))]
    assert composed(overrides, None).train.steps > 0
