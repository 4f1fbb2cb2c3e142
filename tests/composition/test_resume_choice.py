"""A resume may replace a part, which drops the overrides of the replaced part."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from grpocli.composition.compose import compose, save
from grpocli.composition.overrides import rewrite
from grpocli.composition.resume import Resume, changes
from grpocli.config.environment import without_environment

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


OLD_CODE = """
from grpocli.rewards.reward import BaseReward
from grpocli import Callback

def f(completions, **columns): ...
def read(row): ...
class Short(BaseReward):
    limit: int = 3
    def __call__(self, samples): ...
class Scaled:
    scale: float = 1.0
    def __call__(self, scores_PG): ...
class Mine(Callback): ...
"""
TASK = ["task=jsonl", "task.path=d.jsonl", "task.processor=OLD:read"]
MOVED = [
    (["reward=[OLD:f]", "reward.f.weight=2"], ["reward=[NEW:f]"], {"reward.f.weight": 2.0}),
    (["reward=[OLD:f]", "reward.f.weight=2"], ["reward.f.function=NEW:f"], {"reward.f.weight": 2.0}),
    (["reward=[exact_match,OLD:f]"], ["reward=[exact_match,NEW:f]", "reward.f.weight=3"], {"reward.f.weight": 3.0}),
    (
        ["reward=[python]", "reward.python.function=OLD:f"],
        ["reward.python.function=NEW:f"],
        {"reward.python.weight": 1.0},
    ),
    (["reward=[OLD:Short]", "reward.short.limit=5"], ["reward=[NEW:Short]"], {"reward.short.limit": 5}),
    (["reward=[OLD:f,OLD:Short]", "reward.short.limit=5"], ["reward.f.function=NEW:f"], {"reward.short.limit": 5}),
    (["+reward@reward.g=OLD:f", "reward.g.weight=2"], ["+reward@reward.g=NEW:f"], {"reward.g.weight": 2.0}),
    (
        ["algorithm/advantage=OLD:Scaled", "algorithm.advantage.scale=2"],
        ["algorithm/advantage=NEW:Scaled"],
        {"algorithm.advantage.scale": 2.0},
    ),
    (["callbacks=[OLD:Mine]"], ["callbacks=[NEW:Mine]"], {}),
    ([*TASK, "task.prompt_column=q"], ["task.processor=NEW:read"], {"task.prompt_column": "q"}),
]


@pytest.mark.parametrize("place", ["new", "a b"])
@pytest.mark.parametrize("case", range(len(MOVED)))
def test_moved_code_is_named_again_and_keeps_its_keys(case: int, place: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "mine.py", tmp_path / place / "mine.py"
    old.parent.mkdir()
    old.write_text(OLD_CODE)
    began, given, kept = MOVED[case]
    began = rewrite([word.replace("OLD", str(old)) for word in began])
    config = compose(began)
    config.overrides = began
    (tmp_path / "config.yaml").write_text(save(config))
    new.parent.mkdir(parents=True)
    old.rename(new)
    given = [word.replace("NEW", str(new)) for word in given]
    resume = Resume(tmp_path, given)
    merged = resume.merged(compose([o for o in resume.overrides([]) if not o.startswith(("resume", "hydra"))]))
    assert str(old) not in save(merged)
    assert {key: OmegaConf.select(merged, key) for key in kept} == kept
    saved = [without_environment(one) for one in (config, merged)]
    assert {key for key in changes(*saved) if key not in given[-1]} == set(), "a moved file is no change"
