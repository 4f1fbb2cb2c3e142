"""Whole runs with tools: metrics, rollout files, a resume to the bit, two processes as one, real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.running import SMALL, assert_resumes_exactly, killed_after, metrics, run_here

from grpocli.runs.rollouts import read_rollouts

pytestmark = pytest.mark.processes

CALLING = Path(__file__).with_name("calling.py")
TOOLS = ["train", *SMALL, "task.tools=[calculator]", "rollout.max_prompt_tokens=48", "rollout.max_completion_tokens=96"]
RUN = [*TOOLS, "engine=fake", f"engine.function={CALLING}:speak", "reward=[exact_match,tools]", "algorithm=dapo"]
RUN += ["algorithm.keep.surplus=carry", "checkpoint.every=1", "checkpoint.keep=0", "eval.problems=0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tools") / "run"
    assert run_here(*RUN, f"hydra.run.dir={run}") == 0
    return run


def test_calls_are_counted_and_results_are_not_trained_on(whole: Path) -> None:
    for row in metrics(whole):
        assert row["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
        assert 0 < row["tools/failures"] < row["tools/calls"] <= 1
        assert row["tools/calls"] == row["tools/calculator/calls"]
        assert row["rewards/tools/mean"] == pytest.approx(-0.1 * row["tools/failures"])
        assert row["completions/mean_turns"] == 1 + row["tools/calls"]
    rows = read_rollouts(whole / "rollouts" / "step_000001.parquet")
    called = [row for row in rows if row["turns"] == 2]
    assert len(called) > len(rows) / 4
    for row in called:
        call, result, answer = row["episode"]
        assert call["content"].startswith('-> calculator({"')
        assert (result["role"], answer["role"]) == ("tool", "assistant")
        heard = len(result["content"]) + 3  # the tool's turn markers and the model's
        assert [*row["loss_mask"]].count(0) in (heard, len(row["loss_mask"]))
    right = [row for row in called if row["episode"][1]["content"].isdigit()]
    assert {row["reward"] for row in right} == {1.0}
    wrong = [row for row in called if "error" in row["episode"][1]["content"]]
    assert {row["reward/tools"] for row in wrong} == {-0.1}


def test_a_resume_equals_never_having_stopped(whole: Path, tmp_path: Path) -> None:
    assert_resumes_exactly(whole, 1, tmp_path / "killed")


@pytest.mark.survival
def test_two_processes_call_the_same_tools(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_here(*RUN, "hardware.processes=2", "hardware.timeout=120", "train.steps=2", f"hydra.run.dir={run}") == 0
    for step in ("step_000001.parquet", "step_000002.parquet"):
        one, two = (read_rollouts(folder / "rollouts" / step) for folder in (whole, run))
        assert [row["completion_ids"] for row in one] == [row["completion_ids"] for row in two]
    for row, other in zip(metrics(whole), metrics(run), strict=False):
        assert row["tools/calls"] == other["tools/calls"]


FORCED = r"rollout.regex='calculator\(expression=[1-9][0-9][*][1-9][0-9]\)'"


@pytest.mark.vllm
@pytest.mark.survival
def test_tools_with_vllm_a_step_ahead_are_resumed_exactly(tmp_path: Path) -> None:
    """Every turn is a call, until the limit of turns; a resume samples and calls the same."""
    options = ["engine=vllm", "rollout.max_staleness=1", "rollout.in_flight=false", FORCED]
    options += ["checkpoint.every=1", "checkpoint.keep=0"]
    limits = ["task.environment.turns=3", "rollout.max_completion_tokens=160", "eval.problems=0", "train.steps=4"]
    whole = tmp_path / "whole"
    assert run_here(*TOOLS, *options, *limits, f"hydra.run.dir={whole}") == 0
    assert [row["staleness/mean"] for row in metrics(whole)] == [0, 1, 1, 1]
    assert (whole / "checkpoints" / "step_000002" / "stream.json").exists()
    for row in metrics(whole):
        assert row["weight_version"] == row["step"]
        sampled = read_rollouts(whole / "rollouts" / f"step_{row['step']:06d}.parquet")
        assert {one["version"] for one in sampled} == {max(row["step"] - 1, 1)}
        assert (row["tools/calls"], row["tools/failures"], row["completions/mean_turns"]) == (3, 0, 3)
        assert row["completions/clipped_ratio"] == 1
    for row in read_rollouts(whole / "rollouts" / "step_000004.parquet"):
        first, result, *_ = row["episode"]
        left, right = first["content"].split('"')[3].split("*")
        assert int(result["content"]) == int(left) * int(right)
    killed = killed_after(2, whole, tmp_path / "killed")
    assert run_here("train", f"resume={killed}") == 0
    for step in ("step_000003.parquet", "step_000004.parquet"):
        one, two = (read_rollouts(run / "rollouts" / step) for run in (whole, killed))
        assert [row["completion_ids"] for row in one] == [row["completion_ids"] for row in two]
