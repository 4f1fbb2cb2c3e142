"""Rewards as choices of a config group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from grpocli.composition.compose import register_parts
from grpocli.config.build import build
from grpocli.errors import ConfigError
from grpocli.rewards.length import Overlong
from grpocli.rewards.python import PythonReward
from grpocli.rewards.text_match import Format


@pytest.fixture
def rewards(tmp_path: Path):
    """rewards(*overrides): the rewards by name, composed with a user's config folder."""
    register_parts()
    (tmp_path / "reward").mkdir()
    (tmp_path / "main.yaml").write_text(
        "defaults:\n  - reward: [exact_match]\n  - _self_\nrollout: {max_completion_tokens: 256}\n"
    )
    (tmp_path / "reward" / "brevity.yaml").write_text(
        "# @package reward.brevity\n"
        "_target_: grpocli.rewards.python.PythonReward\n"
        "function: mine.py:length\n"
        "weight: 0.5\n"
    )

    def make(*overrides: str) -> dict[str, Any]:
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            config = compose("main", overrides=list(overrides))
        made: dict[str, Any] = build(config)["reward"]
        return made

    return make


def test_several_rewards_have_separate_keys(rewards) -> None:
    made = rewards("reward=[format,overlong]", "reward.format.weight=0.2", "reward.overlong.buffer_tokens=64")
    assert made == {"format": Format(weight=0.2), "overlong": Overlong(max_tokens=256, buffer_tokens=64)}


def test_several_user_functions_have_separate_keys(rewards) -> None:
    made = rewards("reward=[python,brevity]", "reward.python.function=mine:right")
    assert list(made.items()) == [
        ("python", PythonReward(function="mine:right")),
        ("brevity", PythonReward(function="mine.py:length", weight=0.5)),
    ]


def test_a_buffer_longer_than_the_completions_is_refused(rewards) -> None:
    with pytest.raises(ConfigError, match=r"reward\.overlong\.buffer_tokens=300: must be at most .*=256"):
        rewards("reward=[overlong]", "reward.overlong.buffer_tokens=300")
