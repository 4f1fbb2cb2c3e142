"""Runs with environments of one and of several turns: combined, resumed and broken."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from cli.running import SMALL, metrics, run_here
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Env", "cannot reset the environment of arithmetic: KeyError: 'board' ("),
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
