"""eval.stop_at ends a run as a finished one; a higher threshold goes on as if it had never ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.copied import config_dir
from cli.running import SMALL, assert_same_run, metrics, run_here, without_times
from report.test_report_states import view

pytestmark = [pytest.mark.processes, pytest.mark.survival]

REWARD = """
import os
from pathlib import Path

def learned(completions, **kwargs):
    if len(completions) <= 32 // int(os.environ["PROCESSES"]):  # of training: at most the groups of two steps
        return [float((one[0]["content"] or "9")[:1] in "02468") for one in completions]
    log = Path(os.environ["RUN"]) / "metrics.jsonl"  # without the step of this evaluation
    steps = len(log.read_text().splitlines()) if log.exists() else 0
    return [(0.0, i % 2, 1.0)[min(steps, 2)] for i in range(len(completions))]
"""
STEPS = ["eval.problems=40", "eval.every=1", "train.steps=3", "checkpoint.every=3", "optim.schedule=linear"]
HALF = ["eval.stop_at.metric=accuracy", "eval.stop_at.threshold=0.5"]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Train in a folder of tmp_path: its evaluations give 0 before and after step 1, 0.5 after step 2, then 1."""
    monkeypatch.setenv("PROCESSES", "1")
    (tmp_path / "rewards.py").write_text(REWARD)
    reward = ["reward=[python]", f"reward.python.function={tmp_path}/rewards.py:learned"]

    def start(name: str, *options: str) -> Path:
        run = tmp_path / name
        monkeypatch.setenv("RUN", str(run))
        begun = [f"resume={run}"] if run.exists() else [*SMALL, *reward, *STEPS, f"hydra.run.dir={run}"]
        assert run_here("train", *begun, *options) == 0
        return run

    return start


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_a_run_that_reaches_the_threshold_is_finished(train, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train("whole")
    run = train("run", *HALF)
    said = "eval/accuracy is 0.500, at least eval.stop_at.threshold=0.5"
    assert f"the run ends after step 2: {said}" in capsys.readouterr().out
    assert without_times(metrics(run)) == without_times(metrics(whole)[:2])
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    found = summary(run)
    assert [found[key] for key in ("exit", "exit_kind", "steps", "eval/accuracy")] == ["done", "done", 2, 0.5]
    assert found["ended_early"] == {"metric": "eval/accuracy", "value": 0.5, "threshold": 0.5}
    assert (view(run).state, view(run).resume) == ("done", "")
    assert view(run).notice == f"The run ended as asked after step 2 of 3: {said}."
    assert "ended_early" not in summary(whole)

    train("run")
    out = capsys.readouterr().out
    assert f"{run} is finished after 2 of 3 steps: {said}; a higher threshold, or eval.stop_at.metric=null with" in out

    (run / "summary.json").unlink()  # as if it was killed while it wrote the final model
    shutil.rmtree(run / "model")
    train("run")
    assert f"the run ends after step 2: {said}" in capsys.readouterr().out
    assert (summary(run)["ended_early"], len(metrics(run))) == (found["ended_early"], 2)

    train("run", "eval.stop_at.metric=null", "eval.stop_at.threshold=null")
    assert (view(run).state, view(run).notice, "ended_early" in summary(run)) == ("done", "", False)
    assert_same_run(run, whole)


def test_an_evaluation_before_the_first_step_may_end_the_run(train) -> None:
    run = train("run", *HALF[:1], "eval.stop_at.threshold=0")
    assert (summary(run)["steps"], summary(run)["exit"]) == (0, "done")
    assert (view(run).state, (run / "metrics.jsonl").exists()) == ("done", False)
    train("run", "eval.stop_at.threshold=0.5")
    assert (summary(run)["steps"], summary(run)["ended_early"]["value"]) == (2, 0.5)


def test_all_processes_end_at_the_same_step(train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCESSES", "2")
    run = train("run", *HALF, "hardware.processes=2", "hardware.timeout=120")
    assert (summary(run)["steps"], summary(run)["ended_early"]["value"]) == (2, 0.5)


def test_a_resume_trains_on_rollouts_sampled_before_the_run_ended(train, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = [*config_dir(tmp_path / "conf"), "rollout.max_staleness=1", "rollout.in_flight=false"]
    options += ["train.steps=4", "checkpoint.every=0"]
    whole = train("whole", *options)
    run = train("run", *options, *HALF)
    assert summary(run)["steps"] == 2
    train("run", *options[:-4], "eval.stop_at.metric=null", "eval.stop_at.threshold=null")
    assert_same_run(run, whole)
