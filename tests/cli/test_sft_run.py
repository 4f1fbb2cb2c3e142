"""Supervised runs: resumed exactly, with LoRA, as the start of reinforcement learning, and refused combinations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.running import assert_same_run, killed_after, metrics, run_here

from grpocli.errors import ConfigError
from grpocli.launch.compose import build_run, compose
from grpocli.tracking.rollouts import read_rollouts

RUN = [
    *("sft", "model.warm_start_steps=1", "rollout.prompts_per_step=8", "train.steps=4", "eval.problems=4"),
    *("eval.samples=1", "checkpoint.every=1", "checkpoint.keep=0", "optim.lr=3e-3"),
]


@pytest.mark.processes
def test_a_run_learns_resumes_exactly_and_starts_reinforcement_learning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    assert run_here(*RUN, "train.minibatches=2", "eval.every=2", f"hydra.run.dir={whole}") == 0
    shown = capsys.readouterr().out
    assert "learn   8 answers a step" in shown
    assert "held-out answers after 4 steps: loss" in shown
    rows = metrics(whole)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["eval/loss"] < rows[1]["eval/loss"]
    assert {"token_accuracy", "eval/token_accuracy", "eval/accuracy"} <= rows[-1].keys()
    assert not [name for row in rows for name in row if name.startswith("rewards/") or "error" in name]
    records = read_rollouts(whole / "rollouts" / "step_000001.parquet")
    assert len(records) == 8
    for record in records:
        assert record["completion"] == record["answer"]
        assert record["advantage"] == 1
        assert record["logprobs"] is None
    copy = killed_after(2, whole, tmp_path / "copy")
    assert run_here("sft", f"resume={copy}") == 0
    assert_same_run(whole, copy)
    learned = tmp_path / "learned"
    options = ["train.steps=1", "rollout.prompts_per_step=2", "eval.problems=0", "rollout.group_size=2"]
    assert run_here("train", f"model={whole}/model", *options, f"hydra.run.dir={learned}") == 0
    assert run_here("report", str(whole), "--out", str(tmp_path / "page.html")) == 0


@pytest.mark.processes
def test_lora_without_a_reward_measures_the_held_out_loss_only(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_here(*RUN, "train.steps=2", "reward=none", "model.lora=4", f"hydra.run.dir={folder}") == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert {name for name in summary if name.startswith("eval/") and "before" not in name} >= {"eval/loss"}
    assert "eval/accuracy" not in summary
    assert (folder / "model" / "adapter_model.safetensors").exists() or list((folder / "model").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["rollout.group_size=2"], "rollout.group_size"),
        (["rollout.max_staleness=1", "engine=vllm"], "rollout.max_staleness"),
        (["algorithm/keep=dynamic"], "algorithm/keep"),
        (["algorithm/correction=sampler"], "algorithm/correction"),
        (["task.order=difficulty"], "task.order"),
        (["task=calculator"], "task.environment.name"),
    ],
)
def test_what_needs_a_sampler_is_refused(given: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match="supervised training has one answer") as refused:
        build_run(compose(["algorithm=sft", *given]))
    assert refused.value.key == key


def test_groups_of_one_are_for_supervised_training_only() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        build_run(compose(["rollout.group_size=1"]))


def test_the_command_has_one_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("sft", "algorithm=dapo") == 2
    assert "`grpocli sft` is algorithm=sft" in capsys.readouterr().err
    assert run_here("sft", "--help") == 0
    assert "task.target_template" in capsys.readouterr().out
