"""A run is read from its folder: tolerant with a list of problems, or strict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.runs.metrics import json_line
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun

CONFIG = "overrides: [optim.lr=1e-3]\ntask: {_target_: task/sums, path: a}\ntrain: {steps: 3}\nname: ${oc.env:NAME}\n"


def test_a_run_has_its_files(tmp_path: Path) -> None:
    RunDir(tmp_path).config.write_text(CONFIG)
    RunDir(tmp_path).metrics.write_text(json_line(1, {"reward": 0.5}) + json_line(2, {}) + '{"step": 3, "rew')
    run = SavedRun(tmp_path).check()
    assert run.flat == {"task.path": "a", "train.steps": 3, "name": "${oc.env:NAME}"}
    assert (run.overrides, run.choices) == (["optim.lr=1e-3"], {"task": "sums"})
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.problems == ["metrics.jsonl: line 3 is incomplete and left out"]
    assert (run.summary, run.sessions, run.id, run.rollout_files) == ({}, [], "", {})


def test_what_is_broken_is_left_out_or_refused(tmp_path: Path) -> None:
    run = SavedRun(tmp_path)
    assert (run.config, run.metrics, run.summary, run.state) == ({}, [], {}, "unfinished")
    for name, text, problem in [
        ("config.yaml", "[[[", "config.yaml is broken"),
        ("summary.json", "[]", "summary.json is broken"),
        ("metrics.jsonl", "oops\n" + json_line(1, {}), "metrics.jsonl: 1 broken lines are left out (1)"),
    ]:
        (tmp_path / "config.yaml").write_text("seed: 0")
        (tmp_path / name).write_text(text)
        run = SavedRun(tmp_path)
        _ = run.config, run.summary, run.metrics
        assert run.problems == [problem]
        with pytest.raises(ConfigError):
            SavedRun(tmp_path).check()
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ({"exit": "done", "steps": 3}, "done"),
        ({"exit": "done", "steps": 2}, "unfinished"),
        ({"exit": "done", "steps": 2, "ended_early": {"callback": "enough"}}, "done"),
        ({"exit": "SIGTERM after step 2; resume with ...", "exit_kind": "stopped", "steps": 2}, "stopped"),
        ({"exit": "RunError", "steps": 2}, "failed"),
        ({}, "unfinished"),
    ],
)
def test_the_state_of_a_run_is_in_its_summary(summary: dict[str, Any], state: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text(CONFIG)
    run.summary.write_text(json.dumps(summary))
    assert SavedRun(tmp_path).state == state
    with run.locked():
        assert SavedRun(tmp_path).state == "running"
