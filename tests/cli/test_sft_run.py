"""Supervised runs: resumed exactly, with LoRA, as the start of reinforcement learning, and refused combinations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.running import assert_same_run, killed_after, metrics, run_here

from grpocli.composition.compose import build_run, compose
from grpocli.launch.run import steps_of
from grpocli.runs.rollouts import read_rollouts

RUN = ["sft", "model.warm_start_steps=1", "rollout.prompts_per_step=8", "train.steps=4", "eval.problems=4"]
RUN += ["eval.samples=1", "checkpoint.every=1", "checkpoint.keep=0", "optim.lr=3e-3"]


@pytest.mark.processes
def test_a_run_learns_resumes_exactly_and_starts_reinforcement_learning(grpocli, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    more = ["train.minibatches=2", "eval.every=2", "eval.problems=2", f"hydra.run.dir={whole}"]
    _, shown, _ = grpocli(*RUN, *more, code=0)
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


def test_passes_over_the_data_set_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "answer": f"{n}"}) + "\n" for n in range(21)))
    evaluated = tmp_path / "e.jsonl"
    evaluated.write_text('{"prompt": "x", "answer": "x"}\n')
    data = ["task=jsonl", f"task.path={path}", f"task.eval_path={evaluated}", "rollout.prompts_per_step=4"]
    run = build_run(compose(["algorithm=sft", *data]))
    assert [steps_of(epochs, run) for epochs in (1, 2, 0.1)] == [6, 11, 1]
    mixed = ["task=[arithmetic,letter_counting]", "task.arithmetic.train_size=30", "task.letter_counting.train_size=50"]
    run = build_run(compose(["algorithm=sft", *mixed, "task.letter_counting.weight=4", "rollout.prompts_per_step=10"]))
    assert steps_of(1, run) == 15, "arithmetic has a fifth of the draws"


@pytest.mark.processes
def test_a_run_of_one_pass_draws_each_example_once_and_is_not_replayed(grpocli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["task.train_size=24", "train.data_epochs=1", "reward=none", f"hydra.run.dir={folder}"]
    assert run_here(*(word for word in RUN if not word.startswith("train.steps")), *options) == 0
    assert [row["epoch"] for row in metrics(folder)] == [pytest.approx((i + 1) / 3) for i in range(3)]
    prompts = [r["prompt"] for i in (1, 2, 3) for r in read_rollouts(folder / "rollouts" / f"step_{i:06d}.parquet")]
    assert len(set(prompts)) == 24
    assert "is finished after 3 steps" in grpocli("sft", f"resume={folder}", code=0)[1]
    assert "learned answers of the data" in grpocli("replay", str(folder), code=2)[2]


def test_the_command_has_one_algorithm(grpocli) -> None:
    assert "`grpocli sft` is algorithm=sft" in grpocli("sft", "algorithm=dapo", code=2)[2]
    assert "task.target_template" in grpocli("sft", "--help", code=0)[1]
