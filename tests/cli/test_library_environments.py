"""Runs with environments of the libraries verifiers and OpenEnv: repeated, resumed, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.copied import config_dir
from cli.running import EVEN, SMALL, assert_same_run, killed_after, metrics, run_here

from grpocli.runs.rollouts import read_rollouts

pytestmark = pytest.mark.processes

COUNTING = Path(__file__).parents[1] / "library_environments" / "counting_taskset.py"
PLAYED = [
    "train",
    "task=verifiers",
    f"task.env={COUNTING}",
    "task.train_size=16",
    "task.eval_size=4",
    "task.environment.turns=3",
    "task.environment.turn_tokens=6",
    "reward=[environment]",
    "rollout.max_completion_tokens=48",
    *SMALL,
    "eval.problems=2",
]

CALLING = Path(__file__).with_name("calling.py")
CALLED = [
    "train",
    "task=verifiers",
    f"task.env={COUNTING.with_name('tool_taskset.py')}",
    "task.train_size=16",
    "task.eval_size=4",
    "reward=[environment,tools]",
    "rollout.max_prompt_tokens=96",
    "rollout.max_completion_tokens=300",
    *SMALL,
    "eval.problems=0",
]
SPOKEN = ["engine=fake", f"engine.function={CALLING}:add"]


@pytest.mark.survival
def test_tools_of_a_task_are_called_and_counted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_here(*CALLED, *SPOKEN, "train.steps=1", f"hydra.run.dir={run}") == 0
    (row,) = metrics(run)
    assert row["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    names = ("add", "notes_note", "unknown")
    assert 0 < row["tools/failures"] < row["tools/calls"] <= 1
    assert row["tools/calls"] == pytest.approx(sum(row.get(f"tools/{name}/calls", 0.0) for name in names))
    assert row["rewards/tools/mean"] == pytest.approx(-0.1 * row["tools/failures"])
    rows = read_rollouts(run / "rollouts" / "step_000001.parquet")
    right = [one for one in rows if one["turns"] == 2 and one["episode"][1]["content"].isdigit()]
    assert {one["reward/environment"] for one in right} == {1.125}  # the answer, and the state that the call left


@pytest.mark.survival
def test_it_is_resumed_exactly_with_dynamic_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    engine = config_dir(tmp_path / "conf")  # samples beside the trainer, as vLLM does
    sampling = ["algorithm.keep.surplus=discard", "rollout.max_staleness=1", *engine]
    options = ["algorithm=dapo", "reward=[environment,format]", *EVEN[1:], "checkpoint.every=1", "checkpoint.keep=0"]
    whole = tmp_path / "whole"
    assert run_here(*PLAYED, *options, *sampling, "train.steps=2", f"hydra.run.dir={whole}") == 0
    killed = killed_after(1, whole, tmp_path / "killed")
    assert run_here("train", *engine[:2], f"resume={killed}") == 0
    assert_same_run(killed, whole)


@pytest.mark.survival
def test_two_processes_play_the_same_episodes(tmp_path: Path) -> None:
    runs = []
    for options in ((), ("hardware.processes=2", "hardware.timeout=120")):
        runs.append(tmp_path / f"{len(options)}")
        assert run_here(*CALLED, *SPOKEN, *options, "train.steps=1", f"hydra.run.dir={runs[-1]}") == 0
    one, two = (read_rollouts(run / "rollouts" / "step_000001.parquet") for run in runs)
    assert [row["completion_ids"] for row in one] == [row["completion_ids"] for row in two]
