"""A resume may choose another part; the keys of the one before go with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpocli.config.resume import Resume

REWARDS = ["reward=[math, format]", "reward.format.weight=0.5", "reward.math.weight=2"]
SAVED = ["engine=vllm", "engine.base_url=http://127.0.0.1:8000", "+engine.vllm_args.x=1", "optim.lr=0.1", "resume=/old"]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["engine=transformers"], ["engine=vllm", "optim.lr=0.1"]),
        (["engine=vllm"], SAVED[:4]),
        (["engine.base_url=http://127.0.0.1:9000"], SAVED[:4]),
        (["optim=adamw", "train.steps=5"], SAVED[:4]),
    ],
)
def test_overrides_of_a_part_that_is_replaced_are_forgotten(tmp_path: Path, given: list[str], left: list[str]) -> None:
    (tmp_path / ".hydra").mkdir()
    file = tmp_path / ".hydra" / "overrides.yaml"
    file.write_text(yaml.safe_dump(SAVED))
    resume = Resume(tmp_path, given)
    assert resume.overrides([])[:-3] == [*left, *given]
    resume.remember()
    assert yaml.safe_load(file.read_text()) == [*left, *given]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["reward=[math,format,overlong]"], REWARDS),
        (["reward=[format]"], REWARDS[:2]),
        (["reward=[exact_match]"], REWARDS[:1]),
    ],
)
def test_of_several_parts_those_that_stay_keep_theirs(tmp_path: Path, given: list[str], left: list[str]) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(REWARDS))
    assert Resume(tmp_path, given).overrides([])[:-3] == [*left, *given]
