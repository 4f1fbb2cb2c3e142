"""FILE.py:CLASS as a choice of every config group."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import again, begun
from omegaconf import OmegaConf
from tables import table

from grpocli.composition.compose import build_algorithm, build_run, compose, register_parts
from grpocli.composition.overrides import rewrite
from grpocli.config.build import build
from grpocli.config.parts import CLASSES, stored
from grpocli.config.user_code import REQUIRED_MEMBERS, check_members, choice_of
from grpocli.errors import ConfigError

SOURCE = '''
from __future__ import annotations

from grpocli.algorithm.objective import Clip
from grpocli.config.parts import part
from grpocli.rewards.reward import BaseReward
from grpocli.tasks.task import BaseTask

class Rank:
    """Scores, centred and scaled."""

    scale: float = 1.0

    def __call__(self, scores_PG):
        return self.scale * (scores_PG - scores_PG.mean(1, keepdim=True))

@part("algorithm/objective", "mine")
class Mine(Clip):
    extra: float = 1.0

class Doubles(BaseTask):
    count: int = 9

    def examples(self, split):
        return [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(self.count)]

class ShortAnswers(BaseReward):
    limit: int = 3

    def __call__(self, samples):
        return [float(len(sample.text) < self.limit) for sample in samples]

def accuracy(completions, answer, **rest):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def fmt(completions, **rest):
    return [1.0 for _ in completions]

class Nothing:
    pass

class OwnInit:
    def __init__(self, size):
        self.size = size

class ListDefault:
    names: list = []

class Wrong:
    size: complex = 1j

    def __call__(self, scores_PG):
        return scores_PG
'''
KINDS = [
    (["algorithm/advantage=mine.py:Rank", "algorithm.advantage.scale=2"], "algorithm.advantage", {"scale": 2.0}),
    (["algorithm/objective=mine.py:Mine", "algorithm.objective.extra=3"], "algorithm.objective", {"extra": 3.0}),
    (["task=mine.py:Doubles", "task.count=5"], "task", {"count": 5}),
    (["reward=[mine.py:ShortAnswers]", "reward.short_answers.limit=9"], "reward.short_answers", {"limit": 9}),
    (["algorithm/advantage=mine:Rank"], "algorithm.advantage", {"scale": 1.0}),
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)


@pytest.mark.parametrize(("given", "key", "fields"), table(KINDS, fast=3))
def test_every_group_accepts_a_class_of_a_user(given: list[str], key: str, fields: dict[str, Any]) -> None:
    config, name = compose(given), given[0].rpartition(":")[2].rstrip("]")
    assert OmegaConf.select(config, key)._target_ == f"{Path.cwd()}/mine.py:{name}"
    part: Any = build_run(config)
    for word in key.split("."):
        part = part[word] if isinstance(part, dict) else getattr(part, word)
    assert type(part).__name__ == name
    assert {field: getattr(part, field) for field in fields} == fields


def test_functions_are_rewards_under_their_names() -> None:
    run = build_run(compose(["reward=[mine.py:accuracy,math,mine.py:fmt]", "reward.accuracy.weight=2"]))
    assert list(run.reward) == ["accuracy", "math", "fmt"]
    for name in ("accuracy", "fmt"):
        assert run.reward[name].function == f"{Path.cwd()}/mine.py:{name}"
    assert run.reward["accuracy"].weight == 2
    assert list(build_run(compose(["+reward@reward.short=mine.py:fmt"])).reward) == ["exact_match", "short"]


def test_a_mixture_and_a_users_recipe_may_use_them() -> None:
    run = build_run(compose(["task=[mine.py:Doubles,arithmetic]", "task.doubles.count=4"]))
    assert list(run.task.tasks) == ["doubles", "arithmetic"]
    assert run.task.tasks["doubles"].count == 4
    assert list(build_run(compose(["task=mine.py:Doubles"])).tasks) == ["doubles"]
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/ours.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algorithm/advantage: mine.py:Rank\n"
        "algorithm: {advantage: {scale: 5}}\n"
    )
    advantage = build_run(compose([f"hydra.searchpath=[file://{Path.cwd()}/conf]", "recipe=ours"])).algorithm.advantage
    assert (choice_of("algorithm/advantage", advantage), advantage.scale) == ("mine.py:Rank", 5)


def test_a_saved_config_is_built_from_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ["algorithm/advantage=mine.py:Rank", "algorithm.advantage.scale=7", "reward=[mine.py:accuracy]"]
    Path("run").mkdir()
    begun(tmp_path / "run", *rewrite(given))
    monkeypatch.chdir("/")
    assert build(OmegaConf.load(tmp_path / "run" / "config.yaml")).algorithm.advantage.scale == 7  # type: ignore[arg-type]
    run = build_run(again(tmp_path / "run", "algorithm.advantage.scale=8"))
    assert run.algorithm.advantage.scale == 8
    assert list(run.reward) == ["accuracy"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm/advantage=mine.py:Ranks", 'has no function or class Ranks; did you mean "Rank"'),
        ("algorithm/advantage=none.py:Rank", "none.py: there is no such file"),
        ("algorithm/advantage=mine.py:Nothing", "must define __call__, as every choice of algorithm/advantage="),
        ("engine=mine.py:Nothing", "must derive from grpocli.rollout.engine.EnginePart"),
        ("task=[mine.py:Doubles,o.py:Doubles]", "+task@task.NAME=o.py:Doubles"),
        ("algorithm/advantage=mine.py:OwnInit", "it defines __init__"),
        ("algorithm/advantage=mine.py:ListDefault", "mutable default"),
        ("algorithm/advantage=mine.py:Wrong", "has a field that cannot be a config key"),
        ("task=mine.py:fmt", "is a function, which only reward= accepts; give a class"),
    ],
)
def test_an_invalid_part_gives_a_one_sentence_error(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^(algorithm/\w+|engine|optim|task|reward)[=:]") as caught:
        compose([override])
    assert said in str(caught.value)


def test_built_in_parts_have_the_members_that_user_parts_need() -> None:
    register_parts()
    for group in REQUIRED_MEMBERS:
        for choice in stored(group):
            if (group, choice) != ("algorithm/tokens", "all"):  # it chooses nothing, so it is never called
                check_members(CLASSES[f"{group}/{choice}"], group, choice)


def test_the_documented_class_works(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "command_line.md"
    block = re.search(r"    # mine\.py\n((?:    .*\n|\n)+)", page.read_text())
    (tmp_path / "mine.py").write_text(textwrap.dedent(block[1]))
    overrides = [f"algorithm/advantage={tmp_path}/mine.py:Rank", "algorithm.advantage.scale=2", "algorithm/keep=all"]
    rank = build_algorithm(*overrides).advantage
    given = torch.tensor([[0.5, 0.1, 2.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert rank(given).tolist() == [[-1, -3, 3, 1], [-2, 2, 2, -2], [0, 0, 0, 0]]
