"""The config of a resumed run: with changed defaults, replaced parts, and code that has moved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from composed import again, begun, refused
from omegaconf import OmegaConf

from grpocli.algorithm.advantage import KeepAll
from grpocli.algorithm.correction import NoCorrection
from grpocli.composition.compose import build_run, compose, save
from grpocli.composition.overrides import rewrite
from grpocli.composition.resume import Resume, changes
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
    assert run.algorithm.keep == KeepAll()
    assert run.reward["overlong"].buffer_tokens == 2, "the run keeps its rewards"


def test_a_resume_continues_in_the_folder_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with refused("hydra.run.dir"):
        Resume.requested([f"resume={tmp_path}", "hydra.run.dir=/elsewhere"])
    assert Resume.requested([f"resume={tmp_path}", f"hydra.run.dir={tmp_path}"])


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


CODE = """
class Scaled:
    scale: float = 1.0
    def __call__(self, scores_PG): ...
def f(completions, **columns): ...
"""
MOVED = [
    (["reward=[exact_match,OLD:f]", "reward.f.weight=2"], ["reward=[exact_match,NEW:f]"], ("reward.f.weight", 2.0)),
    (
        ["algorithm/advantage=OLD:Scaled", "algorithm.advantage.scale=2"],
        ["algorithm/advantage=NEW:Scaled"],
        ("algorithm.advantage.scale", 2.0),
    ),
]


@pytest.mark.parametrize(("before", "given", "kept"), MOVED)
def test_code_that_has_moved_is_named_again_and_keeps_its_keys(
    before: list[str], given: list[str], kept: tuple[str, float], tmp_path: Path
) -> None:
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(CODE)
    begun(tmp_path, *rewrite([word.replace("OLD", str(old)) for word in before]))
    old.rename(new)
    merged = again(tmp_path, *(word.replace("NEW", str(new)) for word in given))
    assert OmegaConf.select(merged, kept[0]) == kept[1]
    build_run(merged)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a: [1", "line "), ("seed: \udcff", "'utf-8' codec can't decode byte 0xff"), ("a: !!timestamp abc", "")],
)
def test_a_broken_config_is_reported_in_one_line(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=re.escape(f"resume={file}: cannot be read: {problem}")) as refused:
        Resume(tmp_path, []).overrides([])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "override", ["+hydra.callbacks.evil._target_=os.mkdir", "hydra/launcher=slurm", "+task@hydra.callbacks=arithmetic"]
)
def test_a_resume_takes_no_saved_key_of_hydra(tmp_path: Path, override: str) -> None:
    plain = yaml.safe_load(save(compose(["task=arithmetic"]))) | {"overrides": ["task=arithmetic", override]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    assert Resume(tmp_path).overrides([])[0] == "task=arithmetic"
    assert override not in Resume(tmp_path).overrides([])
