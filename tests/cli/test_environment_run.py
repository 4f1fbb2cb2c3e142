"""Runs with environments of one and of several turns: combined, resumed and broken."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from cli.running import SMALL, assert_same_run, killed_after, metrics, run_here
from cli.test_failures import failed

from grpocli.runs.rollouts import read_rollouts

pytestmark = pytest.mark.processes

SCRIPTED = Path(__file__).parents[1] / "environments" / "scripted.py"
TWO = [
    "train",
    "task=[arithmetic]",
    "+task@task.again=arithmetic",
    f"task.again.environment.name={SCRIPTED}:Retry",
    "task.again.environment.turn_tokens=8",
    "reward=[exact_match,environment]",
    "task.arithmetic.rewards=[exact_match]",
    "task.again.rewards=[environment]",
    "rollout.max_completion_tokens=48",
]


def mean(rows: list[dict[str, float]], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


@pytest.mark.survival
def test_two_environments_train_in_one_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_here(*TWO, "train.steps=40", "eval.problems=0", f"hydra.run.dir={run}") == 0
    rows = metrics(run)
    for key in ("task/arithmetic/reward", "task/again/reward"):
        assert mean(rows[-8:], key) > mean(rows[:4], key) + 0.05, [row[key] for row in rows]
    assert mean(rows[-8:], "completions/mean_turns") < mean(rows[:4], "completions/mean_turns")
    trained = [one for one in read_rollouts(run / "rollouts" / "step_000001.parquet") if one["task"] == "again"]
    assert any("<" not in one["completion"] and len(one["completion"]) > 10 for one in trained)
    assert max(row["token_mult_prob_error"] for row in rows) < 1.01  # the trainer scores the sampled tokens


@pytest.mark.survival
def test_a_run_of_episodes_is_resumed_exactly(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    options = [*SMALL, "algorithm=dapo", "algorithm.keep.surplus=carry", "checkpoint.every=1", "checkpoint.keep=0"]
    assert run_here(*TWO, *options, "eval.problems=0", "train.steps=4", f"hydra.run.dir={whole}") == 0
    assert all(row["token_mult_prob_error"] < 1.01 for row in metrics(whole)), "the trainer scores the sampled tokens"
    killed = killed_after(2, whole, tmp_path / "killed")
    assert run_here("train", f"resume={killed}") == 0
    assert_same_run(killed, whole)


@pytest.mark.survival
def test_two_processes_play_the_same_episodes(tmp_path: Path) -> None:
    runs = []
    for options in ((), ("hardware.processes=2", "hardware.timeout=120")):
        runs.append(tmp_path / f"{len(options)}")
        assert run_here(*TWO, *SMALL, *options, "train.steps=2", f"hydra.run.dir={runs[-1]}") == 0
    one, two = (read_rollouts(run / "rollouts" / "step_000001.parquet") for run in runs)
    assert [row["completion_ids"] for row in one] == [row["completion_ids"] for row in two]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Env", "arithmetic: the environment's reset failed: KeyError: 'board' ("),
        ("Evn", 'has no function or class Evn; did you mean "Env"'),
    ],
)
def test_an_environment_that_cannot_start_gives_a_one_sentence_error(
    grpocli, name: str, said: str, tmp_path: Path
) -> None:
    broken = tmp_path / "env.py"
    broken.write_text("class Env:\n    def reset(self, metadata):\n        raise KeyError('board')\n")
    code, sentence = failed(grpocli, "train", *SMALL, f"task.environment.name={broken}:{name}")
    assert code == 2
    assert f"task.environment.name={broken}:{name}: " in sentence
    assert said in sentence


def test_the_calculator_trains_beside_plain_arithmetic(tmp_path: Path) -> None:
    options = [
        "task=[arithmetic,calculator]",
        "reward=[exact_match,environment]",
        "task.calculator.rewards=[environment]",
        "task.arithmetic.rewards=[exact_match]",
    ]
    assert run_here("train", *SMALL, *options, "train.steps=1", f"hydra.run.dir={tmp_path}/run") == 0
    assert all(row["completions/mean_turns"] >= 1 for row in metrics(tmp_path / "run"))
