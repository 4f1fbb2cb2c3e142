"""A resume may replace a part, which drops the overrides of the replaced part."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpocli.launch.compose import compose, save
from grpocli.launch.resume import Resume

REWARDS = ["reward=[math, format]", "reward.format.weight=0.5", "reward.math.weight=2"]
SAVED = ["engine=vllm", "engine.base_url=http://127.0.0.1:8000", "+engine.vllm_args.x=1", "optim.lr=0.1", "resume=/old"]


def again(folder: Path, saved: list[str], given: list[str]) -> list[str]:
    """The overrides that compose a run again, without `resume` and Hydra's."""
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
def test_overrides_of_a_replaced_part_are_dropped(tmp_path: Path, given: list[str], left: list[str]) -> None:
    assert again(tmp_path, SAVED, given) == [*left, *given]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["reward=[math,format,overlong]"], REWARDS),
        (["reward=[format]"], REWARDS[:2]),
        (["reward=[exact_match]"], REWARDS[:1]),
    ],
)
def test_unchanged_parts_keep_their_overrides(tmp_path: Path, given: list[str], left: list[str]) -> None:
    assert again(tmp_path, REWARDS, given) == [*left, *given]


@pytest.mark.slow
def test_the_next_resume_keeps_the_overrides_of_this_one(tmp_path: Path) -> None:
    config = compose(REWARDS)
    config.overrides = REWARDS
    (tmp_path / "config.yaml").write_text(save(config))
    first = Resume(tmp_path, ["reward=[format]"])
    merged = first.merged(compose([o for o in first.overrides([]) if not o.startswith(("resume", "hydra"))]))
    assert merged.overrides == [*REWARDS[:2], "reward=[format]"]
    assert merged.reward.format.weight == 0.5
