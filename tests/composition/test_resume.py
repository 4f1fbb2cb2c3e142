"""The config of a resumed run: with changed defaults, replaced parts, and code that has moved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from composed import again, begun
from omegaconf import OmegaConf
from tables import table

from grpocli.algorithm.correction import NoCorrection
from grpocli.algorithm.keep import All
from grpocli.composition.compose import build_run, compose, save
from grpocli.composition.overrides import rewrite
from grpocli.composition.resume import Resume, changes
from grpocli.config.environment import without_environment
from grpocli.errors import ConfigError

REWARDS = ["reward=[math, format]", "reward.format.weight=0.5", "reward.math.weight=2"]
SAVED = ["engine=vllm", "engine.base_url=http://127.0.0.1:8000", "+engine.vllm_args.x=1", "optim.lr=0.1", "resume=/old"]


def test_a_changed_default_choice_does_not_change_the_run(tmp_path: Path) -> None:
    begun(tmp_path, defaults=["algorithm/correction=none", "algorithm/advantage=center"])
    run = build_run(again(tmp_path, "train.steps=7"))
    assert run.algorithm.correction == NoCorrection()
    assert type(run.algorithm.advantage).__name__ == "Center"
    assert run.train.steps == 7


@pytest.mark.slow
def test_a_key_that_follows_an_override_follows_it(tmp_path: Path) -> None:
    for key, length in (("rollout.max_completion_tokens", 30), ("algorithm.aggregate.length", 20)):
        begun(tmp_path, "algorithm=drgrpo", f"{key}=20")
        assert build_run(again(tmp_path, "rollout.max_completion_tokens=30")).algorithm.aggregate.length == length


@pytest.mark.slow
def test_another_algorithm_drops_the_keys_that_it_lacks(tmp_path: Path) -> None:
    begun(tmp_path, "algorithm=dapo", "reward.overlong.buffer_tokens=2")
    run = build_run(again(tmp_path, "algorithm=grpo"))
    assert run.algorithm.keep == All()
    assert run.reward["overlong"].buffer_tokens == 2, "the run keeps its rewards"


def test_a_resume_continues_in_the_folder_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        Resume.requested([f"resume={tmp_path}", "hydra.run.dir=/elsewhere"])
    assert refused.value.key == "hydra.run.dir"
    assert Resume.requested([f"resume={tmp_path}", f"hydra.run.dir={tmp_path}"])


def test_keys_that_this_version_does_not_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    file = tmp_path / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    saved["model"]["former"] = saved["former"] = 1
    saved["overrides"] = ["model.former=1"]
    file.write_text(yaml.safe_dump(saved))
    assert "former" not in again(tmp_path, "train.steps=7")
    assert "this version has no " in caplog.text
    assert "model.former" in caplog.text


@pytest.mark.slow
def test_a_config_without_its_command_line_is_enough(tmp_path: Path) -> None:
    config = begun(tmp_path, "algorithm=dapo", "optim.lr=0.5")
    file = tmp_path / "config.yaml"
    file.write_text(re.sub(r"overrides:\n(- .*\n)*", "", file.read_text()))
    run, first = build_run(again(tmp_path, "train.steps=9")), build_run(config)
    assert (run.algorithm, run.optim, list(run.reward)) == (first.algorithm, first.optim, list(first.reward))
    assert run.train.steps == 9


def test_changes_lists_only_differences(tmp_path: Path) -> None:
    before = OmegaConf.to_container(compose(["reward=[math]"]), resolve=True)
    given = ["optim.lr=5e-7", "engine=vllm", "reward=[math,format]", "resume=/run", "rollout.stop=[a]"]
    after = OmegaConf.to_container(compose(given), resolve=True)
    assert changes(before, before) == {}
    assert changes(before, after) == {
        "optim.lr": (before["optim"]["lr"], 5e-7),
        "engine": ("auto", "vllm"),
        "reward.format": (None, "format"),
        "rollout.stop": ([], ["a"]),
    }


@pytest.mark.parametrize(
    ("saved", "given", "left"),
    [
        (SAVED, ["engine=transformers"], ["engine=vllm", "optim.lr=0.1"]),
        (SAVED, ["engine.base_url=http://127.0.0.1:9000"], SAVED[:4]),
        (SAVED, ["optim=adamw", "train.steps=5"], SAVED[:4]),
        (REWARDS, ["reward=[math,format,overlong]"], REWARDS),
        (REWARDS, ["reward=[format]"], REWARDS[:2]),
    ],
)
def test_only_overrides_of_a_replaced_part_are_dropped(
    tmp_path: Path, saved: list[str], given: list[str], left: list[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"overrides": saved}))
    assert Resume(tmp_path, given).overrides([])[:-3] == [*left, *given]


@pytest.mark.slow
def test_the_next_resume_keeps_the_overrides_of_this_one(tmp_path: Path) -> None:
    begun(tmp_path, *REWARDS)
    merged = again(tmp_path, "reward=[format]")
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


@pytest.mark.parametrize("case", table(range(len(MOVED)), fast=3))
def test_moved_code_is_named_again_and_keeps_its_keys(case: int, tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "mine.py", tmp_path / "a b" / "mine.py"
    old.parent.mkdir()
    old.write_text(OLD_CODE)
    before, given, kept = MOVED[case]
    config = begun(tmp_path, *rewrite([word.replace("OLD", str(old)) for word in before]))
    new.parent.mkdir()
    old.rename(new)
    given = [word.replace("NEW", str(new)) for word in given]
    merged = again(tmp_path, *given)
    assert str(old) not in save(merged)
    assert {key: OmegaConf.select(merged, key) for key in kept} == kept
    saved = [without_environment(one) for one in (config, merged)]
    assert {key for key in changes(*saved) if key not in given[-1]} == set(), "a moved file is no change"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "line "),
        ("seed: \udcff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_broken_config_is_reported(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=re.escape(f"resume={file}: cannot be read: {problem}")):
        Resume(tmp_path, []).overrides([])


@pytest.mark.parametrize(
    "override", ["+hydra.callbacks.evil._target_=os.mkdir", "hydra/launcher=slurm", "+task@hydra.callbacks=arithmetic"]
)
def test_a_resume_takes_no_saved_key_of_hydra(tmp_path: Path, override: str) -> None:
    plain = yaml.safe_load(save(compose(["task=arithmetic"]))) | {"overrides": ["task=arithmetic", override]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    assert Resume(tmp_path).overrides([])[0] == "task=arithmetic"
    assert override not in Resume(tmp_path).overrides([])
