"""Whole runs that learn from a teacher: with and without rewards, resumed, and from a teacher that is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.running import assert_resumes_exactly, killed_after, metrics, run_here

from grpocli.models.tiny import make_model, make_tokenizer
from grpocli.runs.rollouts import read_rollouts

pytestmark = pytest.mark.processes

RUN = ["train", "algorithm=opd", "model.warm_start_steps=20", "rollout.prompts_per_step=2", "rollout.group_size=2"]
RUN += ["train.steps=3", "eval.problems=0", "checkpoint.every=1", "checkpoint.keep=0"]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    make_model(5).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_a_task_without_answers_trains_and_resumes_exactly(grpocli, tmp_path: Path, teacher: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+{n + 1}="}) + "\n" for n in range(10, 90)))
    whole = tmp_path / "whole"
    options = ["task=jsonl", f"task.path={prompts}", f"algorithm.kl.model={teacher}"]
    _, shown, _ = grpocli(*RUN, *options, "reward=none", f"hydra.run.dir={whole}", code=0)
    assert "without rewards" in shown
    assert "reward " not in shown.partition("starting engine")[2]
    assert "nan" not in shown.lower()
    for row in metrics(whole):
        assert row["kl"] == pytest.approx(row["loss"]) != 0
        assert row["grad_norm"] > 0
        assert not [name for name in row if "reward" in name and name != "time/reward"]
        assert None not in row.values()
        for one in read_rollouts(whole / "rollouts" / f"step_{row['step']:06d}.parquet"):
            assert one["reward"] is None
            assert one["status"] == "trained"
    summary = json.loads((whole / "summary.json").read_text())
    assert not [name for name in summary if name.startswith("eval/")]

    assert_resumes_exactly(whole, 1, tmp_path / "killed")
    shutil.rmtree(teacher)
    again = killed_after(1, whole, tmp_path / "again")
    assert f"algorithm.kl.model={teacher}: there is no such folder" in grpocli("train", f"resume={again}", code=2)[2]


@pytest.mark.survival
def test_rewards_do_not_change_a_distillation(tmp_path: Path, teacher: Path) -> None:
    with_rewards, without = tmp_path / "with", tmp_path / "without"
    for folder, reward in ((with_rewards, "[exact_match]"), (without, "none")):
        options = [f"reward={reward}", f"algorithm.kl.model={teacher}", "train.steps=1", f"hydra.run.dir={folder}"]
        assert run_here(*RUN, *options) == 0
    one, other = ((folder / "model" / "model.safetensors").read_bytes() for folder in (with_rewards, without))
    assert one == other
    assert "reward" in metrics(with_rewards)[0]
