"""Runs with environments: of one turn and of several, beside each other, resumed, and broken."""

from __future__ import annotations

import statistics
from pathlib import Path

from cli.running import SMALL, finish, metrics, start, without_times

from grpocli.tracking.rollouts import read_rollouts

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


def test_two_environments_are_learned_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out = finish(start(*TWO, "train.steps=40", "eval.samples=2", "eval.problems=64", f"hydra.run.dir={run}"))
    assert code == 0, out
    rows = metrics(run)
    for key in ("task/arithmetic/reward", "task/again/reward"):
        assert mean(rows[-8:], key) > mean(rows[:4], key) + 0.05, [row[key] for row in rows]
    assert mean(rows[-8:], "completions/mean_turns") < mean(rows[:4], "completions/mean_turns")
    trained = [one for one in read_rollouts(run / "rollouts" / "step_000001.parquet") if one["task"] == "again"]
    assert any("<" not in one["completion"] and len(one["completion"]) > 10 for one in trained)
    assert max(row["token_mult_prob_error"] for row in rows) < 1.01  # the trainer scores the very tokens


def test_a_run_of_episodes_is_resumed_exactly(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = [*TWO, *SMALL, "algorithm=dapo", "algorithm.keep.surplus=carry", "checkpoint.every=1"]
    code, out = finish(start(*options, "train.steps=4", f"hydra.run.dir={whole}"))
    assert code == 0, out
    code, out = finish(start(*options, "train.steps=2", f"hydra.run.dir={halves}"))
    assert code == 0, out
    code, out = finish(start("train", f"resume={halves}", "train.steps=4"))
    assert code == 0, out
    assert without_times(metrics(halves)) == without_times(metrics(whole))


def test_two_processes_play_the_same_episodes(tmp_path: Path) -> None:
    runs = []
    for options in ((), ("hardware.processes=2", "hardware.timeout=120")):
        runs.append(tmp_path / f"{len(options)}")
        code, out = finish(start(*TWO, *SMALL, *options, "train.steps=2", f"hydra.run.dir={runs[-1]}"))
        assert code == 0, out
    one, two = (read_rollouts(run / "rollouts" / "step_000001.parquet") for run in runs)
    assert [row["completion_ids"] for row in one] == [row["completion_ids"] for row in two]


def test_an_environment_that_cannot_begin_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "env.py"
    broken.write_text("class Env:\n    def reset(self, metadata):\n        raise KeyError('board')\n")
    begins = "arithmetic: its environment could not be reset: KeyError: 'board' ("
    for name, said in (
        (f"{broken}:Env", begins),
        (f"{broken}:Evn", 'has no function or class Evn; did you mean "Env"'),
    ):
        code, out = finish(start("train", *SMALL, f"task.environment.name={name}", f"hydra.run.dir={tmp_path}/run"))
        assert code == 2, out
        assert f"task.environment.name={name}: " in out
        assert said in out
        assert "Traceback" not in out


def test_the_calculator_beside_plain_arithmetic(tmp_path: Path) -> None:
    options = [
        "task=[arithmetic,calculator]",
        "reward=[exact_match,environment]",
        "task.calculator.rewards=[environment]",
    ]
    code, out = finish(
        start("train", *SMALL, *options, "task.arithmetic.rewards=[exact_match]", f"hydra.run.dir={tmp_path}/run")
    )
    assert code == 0, out
    assert all(row["completions/mean_turns"] >= 1 for row in metrics(tmp_path / "run"))
