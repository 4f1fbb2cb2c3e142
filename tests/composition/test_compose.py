"""The config that groups compose, and its printed overview."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conf_files import WRITTEN_FROM
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from tables import table

from grpocli.composition.compose import PART_MODULES, build_run, compose, sweep_folder
from grpocli.composition.hydra_sources import conf_dir
from grpocli.composition.overrides import rewrite
from grpocli.config.parts import CLASSES
from grpocli.hardware import Devices
from grpocli.launch.overview import opening_lines, plan_lines
from grpocli.library_environments import parts
from grpocli.rollout.engine import EngineJob
from grpocli.version import PACKAGE

TABLE = {
    "grpo": ("Std", "Uniform", "All", (0.2, 0.2), ("K3", 0.04), "SequenceMean", {}),
    "dapo": ("Std", "Uniform", "Dynamic", (0.2, 0.28), ("NoKL", None), "TokenMean", {"informative_only": False}),
    "drgrpo": ("Center", "Uniform", "All", (0.2, 0.2), ("NoKL", None), "Constant", {}),
    "dgpo": ("Mad", "Difficulty", "All", (0.2, 0.2), ("NoKL", None), "TokenMean", {"informative_only": True}),
}


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
    "gspo": ("Std", "All", ("Clip", "sequence", 3e-4, 4e-4), "NoKL", "SequenceMean"),
    "luspo": ("Std", "All", ("Clip", "sequence", 2e-3, 2.5e-3), "NoKL", "Constant"),
    "cispo": ("Std", "Dynamic", ("Cispo", None, None, 4.0), "NoKL", "TokenMean"),
    "sapo": ("Std", "All", ("Sapo", None, None, None), "NoKL", "SequenceMean"),
    "gmpo": ("Std", "All", ("Geometric", None, 0.4, 0.4), "NoKL", "SequenceMean"),
    "rloo": ("LeaveOneOut", "All", ("Mirror", None, None, None), "K2", "Constant"),
    "reinforce_pp": ("ReinforcePlusPlus", "All", ("Clip", "token", 0.2, 0.2), "K2", "TokenMean"),
    "maxrl": ("MaxRL", "All", ("Clip", "token", 0.2, 0.2), "NoKL", "TokenMean"),
    "dppo": ("Center", "All", ("Dppo", None, 0.2, 0.2), "NoKL", "TokenMean"),
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


@pytest.mark.parametrize("algorithm", TABLE)
def test_the_algorithms_are_composed_of_their_parts(algorithm: str) -> None:
    a = compose([f"algorithm={algorithm}"]).algorithm
    advantage, weight, keep, clip, (kl, beta), aggregate, options = TABLE[algorithm]
    assert [name(a.advantage), name(a.question_weight), name(a.keep)] == [advantage, weight, keep]
    assert (a.objective.low, a.objective.high) == clip
    assert name(a.kl) == kl
    assert a.kl.get("beta") == beta
    assert name(a.aggregate) == aggregate
    assert options.items() <= OmegaConf.to_container(a.aggregate).items()
    assert name(a.correction) == "AutoCorrection"


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


@pytest.mark.parametrize(
    "path",
    table(sorted(Path(conf_dir()).glob("*/*.yaml")), 12, pytest.mark.survival),
    ids=lambda p: f"{p.parent.name}={p.stem}",
)
def test_every_shipped_choice_builds(path: Path) -> None:
    choice = f"[{path.stem}]" if path.parent.name == "reward" else path.stem
    more = {"jsonl": ["task.path=x.jsonl"], "sft": ["algorithm=sft"], "mixture": ["+task@task.one=arithmetic"]}.get(
        path.stem, []
    )
    config = compose([f"{path.parent.name}={choice}", *more])
    if WRITTEN_FROM not in path.read_text():  # other choices are classes, whose keys may have no default
        build_run(config)


def test_the_overview_counts_completions_and_updates() -> None:
    run = build_run(
        compose(
            [
                "rollout.prompts_per_step=6",
                "rollout.group_size=4",
                "train.minibatches=4",
                "train.epochs=2",
                "train.steps=10",
            ]
        )
    )
    sample, train, evaluation, total = plan_lines(run, Devices(1))
    assert "6 prompts x 4 = 24 completions a step" in sample
    assert "2 x 4 = 8 updates a step, 1 or 2 groups each" in train
    assert "256 problems x (4 + 1 greedy) = 1,280 completions, before and after" in evaluation
    assert "fewer: eval.problems=64" in evaluation
    assert "10 steps, 80 updates, 240 completions" in total


def test_the_first_lines_name_model_task_and_method(tmp_path: Path) -> None:
    run = build_run(compose(["task=[arithmetic,countdown]", "reward=[number,format]", "algorithm=dapo", "engine=vllm"]))
    job = EngineJob("/models/m", "bfloat16", 100, tmp_path, seed=0)
    said = "\n".join(opening_lines(run, job, Devices(1), {"model": "hf", "algorithm": "dapo"}))
    for fact in ("hf (/models/m)", "bfloat16", "the CPU", "arithmetic, countdown", "number, format", "=dapo", "=vllm"):
        assert fact in said
    assert "2 GPUs" in opening_lines(run, job, Devices(2, ("0", "1")), {})[0]


def test_a_user_may_add_a_reward_and_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "recipe").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(
        "# @package reward.mine\n_target_: grpocli.rewards.python.PythonReward\nfunction: mine.py:score\n"
    )
    (tmp_path / "recipe" / "short.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /algorithm: dgpo\n  - override /reward: [mine]\n"
        "train: {steps: 7}\n"
    )
    run = build_run(compose([f"hydra.searchpath=[file://{tmp_path}]", "recipe=short"]))
    assert run.train.steps == 7
    assert list(run.reward) == ["mine"]
    assert run.algorithm.aggregate.informative_only


def test_interpolations_of_hydra_have_values_outside_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        "task=jsonl",
        "task.path=${hydra:runtime.cwd}/d.jsonl",
        "rollout.stop=['${hydra:job.name}${hydra:job.num}']",
    ]
    run = build_run(compose(given))
    assert run.task.path == f"{tmp_path}/d.jsonl"
    assert run.rollout.stop == ["train0"]
    sweep = rewrite(["hydra.sweep.dir=${hydra:runtime.cwd}/sw", "hydra.sweep.subdir=${hydra:job.name}"])
    assert sweep_folder(sweep) == tmp_path / "sw" / "train"
    assert not HydraConfig.initialized()
