"""The configs of the page "Your first real run" compose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpocli.cli import COMMANDS
from grpocli.cli.hydra_app import composed

MISSING = object()
PAGE = Path(__file__).parents[2] / "docs" / "first_run.md"
ROWS = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
CODE = re.compile(r"`([^`]+)`")
LINES = [shlex.split(line)[1:] for line in PAGE.read_text().splitlines() if line.startswith("    grpocli ")]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_of_the_page_exists_and_its_config_composes(words: list[str]) -> None:
    assert words[0] in COMMANDS
    overrides = [word for word in words[1:] if "=" in word and not word.startswith(("resume=", "hydra."))]
    assert composed(overrides, None).train.steps > 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip(" `"))
def test_a_row_names_a_metric_and_keys_that_exist(row: list[str]) -> None:
    assert row[0].strip() in (PAGE.with_name("metrics.md")).read_text()
    config = composed(["task=gsm8k"], None)
    for words in CODE.findall(row[-1]):
        if "=" in words:
            assert composed([words], None).train.steps > 0
        elif not words.startswith("grpocli "):
            assert OmegaConf.select(config, words, default=MISSING) is not MISSING
