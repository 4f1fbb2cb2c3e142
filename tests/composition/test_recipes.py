"""Recipes: the papers' numbers, their small versions, and their index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from grpocli.composition.compose import build_run, compose
from grpocli.composition.hydra_sources import conf_dir
from grpocli.config.yaml_text import leaves

RECIPES = Path(conf_dir()) / "recipe"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))

COMMON = {
    "algorithm.question_weight.reward": None,
    "optim._target_": "optim/adamw",
    "optim.max_grad_norm": 1.0,
    "optim.schedule": "constant",
    "reward.math._target_": "reward/math",
    "reward.math.right": 1.0,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.epochs": 1,
}
NO_KL = {"algorithm.kl._target_": "algorithm/kl/none"}
OF_QWEN_MATH = NO_KL | {
    "algorithm.objective.high": 0.2,
    "algorithm.objective.low": 0.2,
    "model.path": "Qwen/Qwen2.5-Math-7B",
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0.0,
    "reward.math.wrong": 0.0,
    "rollout.group_size": 8,
    "train.minibatches": 1,
}
OF_DAPO = NO_KL | {
    "algorithm.advantage._target_": "algorithm/advantage/std",
    "algorithm.aggregate._target_": "algorithm/aggregate/token_mean",
    "algorithm.objective.high": 0.28,
    "algorithm.objective.low": 0.2,
    "optim.lr": 1e-6,
    "optim.weight_decay": 0.1,
    "reward.math.wrong": -1.0,
    "reward.overlong.buffer_tokens": 4096,
    "reward.overlong.weight": 1.0,
    "rollout.group_size": 16,
    "rollout.max_prompt_tokens": 2048,
    "rollout.prompts_per_step": 512,
    "train.minibatches": 16,
}
PAPERS: dict[str, dict[str, Any]] = {
    "deepseekmath-grpo": {
        "algorithm.advantage._target_": "algorithm/advantage/std",
        "algorithm.aggregate._target_": "algorithm/aggregate/sequence_mean",
        "algorithm.kl._target_": "algorithm/kl/k3",
        "algorithm.kl.beta": 0.04,
        "model.path": "deepseek-ai/deepseek-math-7b-instruct",
        "optim.lr": 1e-6,
        "rollout.group_size": 64,
        "rollout.max_completion_tokens": 1024,
        "rollout.prompts_per_step": 16,  # 1,024 completions
        "train.minibatches": 1,
    },
    "dapo-qwen2.5-32b": OF_DAPO
    | {
        "algorithm.keep._target_": "algorithm/keep/dynamic",
        "algorithm.keep.mask_truncated": False,
        "algorithm.keep.max_rounds": 10,
        "algorithm.keep.reward": "math",
        "model.path": "Qwen/Qwen2.5-32B",
        "optim.warmup_steps": 20 * 16,
        "reward.overlong.max_tokens": 16384 + 4096,
        "rollout.max_completion_tokens": 16384 + 4096,
    },
    "async-dapo-qwen2.5-math-7b": OF_DAPO
    | {
        "algorithm.correction._target_": "algorithm/correction/sampler",
        "algorithm.keep._target_": "algorithm/keep/all",
        "algorithm.objective.dual": 10.0,
        "engine.replicas": 2,
        "engine.tensor_parallel": 4,
        "hardware.context_parallel": 4,
        "hardware.rollout_nodes": 8,
        "hardware.train_nodes": 8,
        "model.path": "Qwen/Qwen2.5-Math-7B",
        "rollout.in_flight": True,
        "rollout.max_completion_tokens": 28 * 1024,
        "rollout.max_staleness": 1,
        "train.steps": 400,
    },
    "drgrpo-qwen2.5-math-7b": OF_QWEN_MATH
    | {
        "algorithm.advantage._target_": "algorithm/advantage/center",
        "algorithm.aggregate._target_": "algorithm/aggregate/constant",
        "algorithm.aggregate.length": 3000,
        "optim.betas": [0.9, 0.95],
        "optim.lr": 1e-6,
        "rollout.max_completion_tokens": 3000,
        "rollout.max_prompt_tokens": 1024,
        "rollout.prompts_per_step": 16,
    },
    "dgpo-qwen2.5-math-7b": OF_QWEN_MATH
    | {
        "algorithm.advantage._target_": "algorithm/advantage/mad",
        "algorithm.aggregate._target_": "algorithm/aggregate/token_mean",
        "algorithm.aggregate.informative_only": True,
        "algorithm.question_weight._target_": "algorithm/question_weight/difficulty",
        "algorithm.question_weight.temperature": 2.0,
        "optim.lr": 5e-7,
        "rollout.max_completion_tokens": 1024,
        "rollout.max_prompt_tokens": 512,
        "rollout.prompts_per_step": 32,
    },
}

OVERLONG = {"reward.overlong.max_tokens", "reward.overlong.buffer_tokens", "optim.warmup_steps"}
SMALL: dict[str, tuple[str, set[str]]] = {  # the paper's recipe, and keys beside SIZES that may differ from it
    "grpo-small": ("deepseekmath-grpo", {"rollout.group_size"}),
    "dapo-small": ("dapo-qwen2.5-32b", OVERLONG),
    "drgrpo-small": ("drgrpo-qwen2.5-math-7b", {"algorithm.aggregate.length"}),
    "dgpo-small": ("dgpo-qwen2.5-math-7b", set()),
}
# Keys that a small recipe may change: hardware and sizes. Sections end in a dot.
SIZES = (
    *("model.", "task.", "engine.", "checkpoint.", "eval.", "optim.lr"),
    *("rollout.prompts_per_step", "rollout.max_prompt_tokens", "rollout.max_completion_tokens"),
    *("train.steps", "train.micro_batch_tokens", "train.gradient_checkpointing"),
)


def resolved(name: str) -> dict[str, Any]:
    """{dotted key: value} of a recipe."""
    return dict(leaves(OmegaConf.to_container(compose([f"recipe={name}"]), resolve=True), lists=False))


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_composes_and_builds(name: str) -> None:
    build_run(compose([f"recipe={name}"]))


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_recipe_has_the_papers_numbers(name: str) -> None:
    config = resolved(name)
    wanted = COMMON | PAPERS[name]
    assert {key: config.get(key, "missing") for key in wanted} == wanted


@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_differs_from_its_papers_only_in_sizes(name: str) -> None:
    of_paper, others = SMALL[name]
    small, paper = resolved(name), resolved(of_paper)
    differing = {key for key in small | paper if small.get(key, "missing") != paper.get(key, "missing")}
    assert {key for key in differing if not key.startswith(SIZES)} == others


def test_small_dapo_keeps_the_papers_shares() -> None:
    small, paper = build_run(compose(["recipe=dapo-small"])), build_run(compose(["recipe=dapo-qwen2.5-32b"]))
    for run in (small, paper):
        assert run.reward["overlong"].buffer_tokens / run.rollout.max_completion_tokens == 1 / 5
        assert run.optim.warmup_steps / (run.train.steps * run.train.updates_per_step) == 1 / 16


def test_every_recipe_is_in_the_index() -> None:
    index = (RECIPES / "README.md").read_text()
    rows = {line.split("`")[1] for line in index.splitlines() if line.startswith("| `")}
    assert rows == set(NAMES)


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_recipe_has_a_readme_with_source_numbers_hardware_and_result(name: str) -> None:
    text = (RECIPES / f"{name}.md").read_text()
    assert f"recipe={name}" in text
    for part in ("arXiv", "## Numbers", "## Hardware", "## Expected", "## Shrunk"):
        assert part in text
