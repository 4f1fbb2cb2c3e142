"""The report of real runs: killed, stopped, resumed, running, of a mixture, with an environment, with user code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.running import SMALL, killed_after, run_here
from omegaconf import OmegaConf
from report.test_report_data import row, run_folder

from grpocli.composition.compose import compose, save
from grpocli.runs.run_dir import RunDir
from grpocli_tools.report.build_page import Builder
from grpocli_tools.report.page_data import PageData, RunView
from grpocli_tools.report.report_page import formula_lines_of

STOPPING = """
import os, signal
from pathlib import Path

def even(completions, **kwargs):
    once = Path(__file__).with_name("once")
    if len(completions) == 16 and not once.exists():  # of a training step
        once.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return [float((one[0]["content"] or "9")[:1] in "02468") for one in completions]
"""


def page(*folders: Path) -> PageData:
    return Builder(formula_lines_of).page(folders)


def view(run: Path) -> RunView:
    (found,) = page(run).runs
    return found


@pytest.mark.survival
@pytest.mark.processes
def test_a_stopped_and_then_resumed_run_has_its_sessions_and_changed_keys(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "rewards.py").write_text(STOPPING)
    reward = ["reward=[python]", "reward.python.process=false", f"reward.python.function={tmp_path}/rewards.py:even"]
    assert run_here("train", *SMALL, *reward, f"hydra.run.dir={run}") == 3
    stopped = view(run)
    assert (stopped.state, stopped.steps[-1], stopped.total_steps) == ("stopped", 1, 3)
    assert len(stopped.sessions) == 1
    assert stopped.notice.startswith("The run was stopped after step 1 of 3: SIGTERM after step 1.")
    assert json.loads((run / "summary.json").read_text())["exit_kind"] == "stopped"
    assert stopped.formula

    assert run_here("train", f"resume={run}", "optim.lr=0.001") == 0
    resumed = view(run)
    assert (resumed.state, resumed.steps[-1]) == ("done", 3)
    assert [steps for steps, _, _ in resumed.sessions] == ["from step 1", "from step 2"]
    assert (resumed.starts, dict(resumed.facts)["sessions"]) == ([1], "2, resumed after step 1")
    assert json.loads((run / "summary.json").read_text())["exit_kind"] == "done"
    assert "optim.lr 0.0005 → 0.001" in resumed.sessions[1][2]
    assert "optim.lr" not in resumed.sessions[0][2]
    assert dict(resumed.facts)["update"].startswith("lr 0.001")

    killed = killed_after(2, run, tmp_path / "killed")
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    found = page(killed)
    assert (found.runs[0].state, found.runs[0].steps) == ("unfinished", [1, 2])
    assert "killed: metrics.jsonl: line 3 is incomplete and left out" in found.notes
    with RunDir(killed).locked():
        assert view(killed).state == "running"


@pytest.mark.processes
def test_a_mixture_and_an_environment(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_here("train", *SMALL, "task=[arithmetic,calculator]", "train.steps=2", f"hydra.run.dir={run}") == 0
    found = page(run)
    facts = dict(found.runs[0].facts)
    assert facts["task"] == "arithmetic, calculator"
    assert facts["sampling"].startswith("prompts_per_step 4, group_size 4, temperature 1, ")
    assert {prompt.task for prompt in found.prompts} == {"arithmetic", "calculator"}
    titles = {chart.id for chart in found.charts}
    assert {"accuracy_tasks", "task_reward"} <= titles
    assert found.notes == []


NOTICES = [
    (None, 9, "The run was killed after step 3 of 9: it has written no summary. Without a checkpoint it starts again."),
    ("SIGINT after step 3; resume with: grpocli train resume=/x", 9, "The run was stopped after step 3 of 9: SIGINT"),
    ("ValueError: <b>x</b>.", 9, "The run failed after step 3 of 9: ValueError: <b>x</b>. Without"),
    ("done", 3, ""),
    ("done", 2, "The run has 3 steps, more than train.steps=2."),
]


@pytest.mark.parametrize(("cause", "asked", "notice"), NOTICES)
def test_a_run_that_ended_early_names_what_continues_it(tmp_path: Path, cause, asked: int, notice: str) -> None:
    run = run_folder(tmp_path / "a run", [row(step, reward=0.5) for step in (1, 2, 3)], f"train: {{steps: {asked}}}\n")
    if cause:
        kind = "done" if cause == "done" else "stopped" if cause.startswith("SIGINT") else "failed"
        summary = {"steps": 3, "exit": cause, "exit_cause": cause.partition("; ")[0], "exit_kind": kind}
        (run / "summary.json").write_text(json.dumps(summary))
    found = view(run)
    assert found.notice.startswith(notice)
    assert bool(found.notice) == bool(notice)
    assert found.resume == ("" if cause == "done" else f"grpocli train 'resume={run}'")
    assert dict(found.facts)["steps"] == f"3 of {asked}"


def written(run: Path, *overrides: str, **replaced: dict[str, Any]) -> Path:
    """A run that has begun. replaced: {section: value} of its config."""
    choices = OmegaConf.to_container(compose(list(overrides), with_hydra=True).hydra.runtime.choices)
    values = OmegaConf.to_container(OmegaConf.create(save(compose(list(overrides))))) | {"overrides": list(overrides)}
    algorithm = values["algorithm"] | replaced.pop("algorithm", {})
    run_folder(run, [row(1, reward=0.5)], json.dumps(values | replaced | {"algorithm": algorithm}))
    (run / ".hydra").mkdir()
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"choices": choices}}}))
    return run


def test_facts_are_for_people(tmp_path: Path) -> None:
    typed = ["algorithm=dapo", "algorithm/kl=k3", "algorithm.kl.beta=0.1", "train.epochs=2"]
    run = written(tmp_path / "run", *typed, "hardware.device=cpu", "hardware.processes=2")
    facts = dict(view(run).facts)
    assert facts["algorithm"] == "dapo with kl=k3, kl.beta=0.1"
    assert facts["rewards"] == "exact_match, overlong × 0.5"
    assert facts["update"] == "lr 0.0005, schedule constant, max_grad_norm 1, epochs 2, minibatches 1"
    assert facts["hardware"] == "device cpu, processes 2, parallel ddp"


def test_a_report_runs_no_code_of_a_run(tmp_path: Path) -> None:
    mark, code = tmp_path / "ran", tmp_path / "mine.py"
    code.write_text(f"open({str(mark)!r}, 'w')\ndef score(*args, **kwargs): return []\nclass Rank: pass\n")
    for name, reward, advantage in (
        ("reward", f"{code}:score", "algorithm/advantage/std"),
        ("advantage", "reward/exact_match", f"{code}:Rank"),
        ("module", "os.system", "algorithm/advantage/std"),
    ):
        parts = {"reward": {"mine": {"_target_": reward, "weight": 2.0}}}
        written(tmp_path / "runs" / name, **parts, algorithm={"advantage": {"_target_": advantage}})
    found = page(tmp_path / "runs")
    assert not mark.exists()
    formulas = {view.name: bool(view.formula) for view in found.runs}
    assert formulas == {"advantage": False, "module": True, "reward": True}
    assert any("is code outside grpocli, which a report does not run" in note for note in found.notes)
