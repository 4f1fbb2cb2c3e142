"""The config that groups compose, and its printed overview."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from conf_files import WRITTEN_FROM
from hydra.core.hydra_config import HydraConfig
from tables import table

from grpocli.cli.hydra_app import search_path
from grpocli.composition.compose import PART_MODULES, build_run, compose, sweep_folder
from grpocli.composition.hydra_sources import conf_dir
from grpocli.composition.overrides import rewrite
from grpocli.config.parts import CLASSES
from grpocli.errors import ConfigError
from grpocli.library_environments import parts
from grpocli.version import PACKAGE

CONF = Path(conf_dir())


def name(node: Any) -> str:
    return CLASSES[node._target_].__name__


def test_every_module_with_parts_is_imported_at_start() -> None:
    imported = set(re.findall(r"^import ([\w.]+)$", Path(parts.__file__).read_text(), re.MULTILINE))
    named = [(room, name) for room, names in PART_MODULES.items() for name in names.split()]
    imported |= {f"grpocli.{room}.{name}".replace("..", ".") for room, name in named}
    declaring = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^@(part|named)\(", path.read_text(), re.MULTILINE)
    }
    assert declaring == imported


NAMED = {
    "gspo": ("Std", "KeepAll", ("Clip", "sequence", 3e-4, 4e-4), "NoKL", "SequenceMean"),
    "luspo": ("Std", "KeepAll", ("Clip", "sequence", 2e-3, 2.5e-3), "NoKL", "Constant"),
    "cispo": ("Std", "DynamicSampling", ("Cispo", None, None, 4.0), "NoKL", "TokenMean"),
    "sapo": ("Std", "KeepAll", ("Sapo", None, None, None), "NoKL", "SequenceMean"),
    "gmpo": ("Std", "KeepAll", ("Geometric", None, 0.4, 0.4), "NoKL", "SequenceMean"),
    "rloo": ("LeaveOneOut", "KeepAll", ("Mirror", None, None, None), "K2", "Constant"),
    "reinforce_pp": ("ReinforcePlusPlus", "KeepAll", ("Clip", "token", 0.2, 0.2), "K2", "TokenMean"),
    "maxrl": ("MaxRL", "KeepAll", ("Clip", "token", 0.2, 0.2), "NoKL", "TokenMean"),
    "dppo": ("Center", "KeepAll", ("Dppo", None, 0.2, 0.2), "NoKL", "TokenMean"),
}


@pytest.mark.parametrize("algorithm", NAMED)
def test_papers_are_names_of_combinations(algorithm: str) -> None:
    """Each also composes with another choice of a part that it sets values of."""
    a = compose([f"algorithm={algorithm}"]).algorithm
    objective = (name(a.objective), *(a.objective.get(key) for key in ("level", "low", "high")))
    assert (name(a.advantage), name(a.keep), objective, name(a.kl), name(a.aggregate)) == NAMED[algorithm]
    assert (name(a.question_weight), name(a.tokens), name(a.entropy)) == ("Uniform", "AllTokens", "NoEntropy")
    others = ["algorithm/objective=sapo", "algorithm/kl=none", "algorithm/aggregate=token_mean"]
    assert name(compose([f"algorithm={algorithm}", *others]).algorithm.objective) == "Sapo"


@pytest.mark.slow
def test_dapo_punishes_length_after_the_accuracy_reward() -> None:
    rewards = compose(["algorithm=dapo"]).reward
    assert {name: reward.weight for name, reward in rewards.items()} == {"exact_match": 1.0, "overlong": 0.5}
    assert compose(["algorithm=dapo", "reward=[math]", "reward.overlong.weight=2"]).reward.overlong.weight == 2
    assert compose(["reward=[math,overlong]"]).reward.overlong.weight == 1
    assert list(compose(["algorithm=grpo"]).reward) == ["exact_match"]


def test_a_default_may_follow_another_key() -> None:
    config = compose(["algorithm=drgrpo", "rollout.max_completion_tokens=77"])
    assert config.algorithm.aggregate.length == 77
    assert compose(["algorithm=drgrpo", "algorithm.aggregate.length=5"]).algorithm.aggregate.length == 5


MORE = {
    "task=jsonl": ["task.path=x.jsonl"],
    "task=mixture": ["+task@task.one=arithmetic"],
    "algorithm_defaults=sft": ["algorithm=sft"],
}
"""What a choice needs beside it."""


def shipped(*, classes: bool) -> list[list[str]]:
    """Rows of choices, one of each group at a time, until every choice was in one.

    classes: whether those that are classes, whose keys may have no default, or those with a YAML by hand.
    """
    choices: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        if path.parent.name != "recipe" and (WRITTEN_FROM in path.read_text()) == classes:
            name = f"[{path.stem}]" if path.parent.name == "reward" else path.stem
            choices.setdefault(path.parent.name, []).append(f"{path.parent.name}={name}")
    apart = [[choices.pop(group)] for group in list(choices) if group.endswith("_defaults")]
    together = itertools.zip_longest(*choices.values())
    rows = [[one for one in row if one] for row in together] + [[one] for (group,) in apart for one in group]
    return [[*row, *(more for one in row for more in MORE.get(one, []))] for row in rows]


@pytest.mark.parametrize("choices", table(shipped(classes=False), 4, pytest.mark.survival), ids=" ".join)
def test_every_shipped_config_builds(choices: list[str]) -> None:
    build_run(compose(choices))


@pytest.mark.parametrize("choices", table(shipped(classes=True), 4, pytest.mark.survival), ids=" ".join)
def test_every_shipped_part_composes(choices: list[str]) -> None:
    compose(choices)


def test_a_user_may_add_a_reward_and_a_recipe(tmp_path: Path) -> None:
    for folder in ("reward", "recipe"):
        (tmp_path / folder).mkdir()
    mine = "# @package reward.mine\n_target_: reward/python\nfunction: mine.py:score\n"
    (tmp_path / "reward" / "mine.yaml").write_text(mine)
    defaults = "defaults:\n  - override /algorithm: dgpo\n  - override /reward: [mine]\n"
    (tmp_path / "recipe" / "short.yaml").write_text(f"# @package _global_\n{defaults}train: {{steps: 7}}\n")
    run = build_run(compose([f"hydra.searchpath=[file://{tmp_path}]", "recipe=short"]))
    assert run.train.steps == 7
    assert list(run.reward) == ["mine"]
    assert run.algorithm.aggregate.informative_only


MATH = (CONF / "reward" / "math.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "text", "override", "key"),
    [
        ("optim/adamw", "lr: 1", "seed=1", "optim/adamw.yaml"),  # Hydra would use ours
        ("optim/mine", "lr: 1", "optim=mime", "optim"),
        ("optim/mine", "lr: 1", "optim=mine", "optim"),
        ("reward/mine", MATH, "reward=[math,mine]", "reward=[math,mine]"),
    ],
)
def test_a_wrong_file_of_a_user_is_refused(name: str, text: str, override: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.yaml"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        build_run(compose([*search_path(str(tmp_path)), override]))
    assert refused.value.key.removeprefix(f"{tmp_path}/") == key


def test_a_copied_file_has_its_values(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    mine = MATH.replace("@package reward.math", "@package reward.mine").replace("weight: 1.0", "weight: 0.3")
    (tmp_path / "reward" / "mine.yaml").write_text(mine)
    assert compose([*search_path(str(tmp_path)), "reward=[math,mine]"]).reward.mine.weight == 0.3


def test_interpolations_of_hydra_have_values_outside_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stop = "rollout.stop=['${hydra:job.name}${hydra:job.num}']"
    run = build_run(compose(["task=jsonl", "task.path=${hydra:runtime.cwd}/d.jsonl", stop]))
    assert run.task.path == f"{tmp_path}/d.jsonl"
    assert run.rollout.stop == ["train0"]
    sweep = rewrite(["hydra.sweep.dir=${hydra:runtime.cwd}/sw", "hydra.sweep.subdir=${hydra:job.name}"])
    assert sweep_folder(sweep) == tmp_path / "sw" / "train"
    assert not HydraConfig.initialized()
