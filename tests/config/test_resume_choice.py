"""A resume may choose another part; the keys of the one before go with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpocli.launch.compose import compose, save
from grpocli.launch.resume import Resume

REWARDS = ["reward=[math, format]", "reward.format.weight=0.5", "reward.math.weight=2"]
SAVED = ["engine=vllm", "engine.base_url=http://127.0.0.1:8000", "+engine.vllm_args.x=1", "optim.lr=0.1", "resume=/old"]


def again(folder: Path, saved: list[str], given: list[str]) -> list[str]:
    """The overrides that compose a run again, without those that every resume has."""
    (folder / "config.yaml").write_text(yaml.safe_dump({"overrides": saved}))
    return Resume(folder, given).overrides([])[:-3]


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
    assert again(tmp_path, SAVED, given) == [*left, *given]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["reward=[math,format,overlong]"], REWARDS),
        (["reward=[format]"], REWARDS[:2]),
        (["reward=[exact_match]"], REWARDS[:1]),
    ],
)
def test_of_several_parts_those_that_stay_keep_theirs(tmp_path: Path, given: list[str], left: list[str]) -> None:
    assert again(tmp_path, REWARDS, given) == [*left, *given]


def test_the_next_resume_knows_what_this_one_was_given(tmp_path: Path) -> None:
    config = compose(REWARDS)
    config.overrides = REWARDS
    (tmp_path / "config.yaml").write_text(save(config))
    first = Resume(tmp_path, ["reward=[format]"])
    merged = first.merged(compose([o for o in first.overrides([]) if not o.startswith(("resume", "hydra"))]))
    assert merged.overrides == [*REWARDS[:2], "reward=[format]"]
    assert merged.reward.format.weight == 0.5
