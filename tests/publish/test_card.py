"""summary.json and the model card of a run."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpocli.publish.published import model_card
from grpocli.runs.metrics import reserve_space, summary_of, write_summary
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun

CONFIG = """\
algorithm: {_target_: grpocli.algorithm.algorithm.Algorithm}
reward: {math: {weight: 1.0}, format: {weight: 0.5}}
task: {_target_: task/arithmetic}
model: {_target_: model/tiny}
seed: 0
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "day" / "time")
    run.path.mkdir(parents=True)
    run.config.write_text(CONFIG)
    return run


def summary(run: RunDir, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "steps": 60,
        "seconds": 61.23,
        "before": {"eval/accuracy": 0.25, "eval/accuracy_greedy": 0.5},
        "after": {"eval/accuracy": 0.75, "eval/accuracy_greedy": 0.875},
        "metrics": {"reward": 0.7, "kl": math.nan},
        "cause": "done",
        "kind": "done",
    }
    made = summary_of(**(values | changes))
    write_summary(run.summary, made)
    return made


def test_the_summary_has_accuracies_and_last_metrics(run: RunDir) -> None:
    summary(run)
    assert json.loads(run.summary.read_text()) == {
        "steps": 60,
        "seconds": 61.2,
        "exit": "done",
        "exit_kind": "done",
        "eval/accuracy_before": 0.25,
        "eval/accuracy_greedy_before": 0.5,
        "eval/accuracy": 0.75,
        "eval/accuracy_greedy": 0.875,
        "last": {"reward": 0.7, "kl": None},
    }


def test_a_run_is_finished_if_its_summary_says_so(run: RunDir) -> None:
    assert SavedRun(run.path).finished_steps is None
    summary(run)
    assert SavedRun(run.path).finished_steps == 60
    summary(run, cause="stopped")
    assert SavedRun(run.path).finished_steps is None
    for damaged in ("", "[]", '{"exit": "done"}'):
        run.summary.write_text(damaged)
        assert SavedRun(run.path).finished_steps is None


@pytest.mark.processes
def test_a_summary_can_be_written_to_a_full_disk(small_disk: Path) -> None:
    run = RunDir(small_disk)
    reserve_space(run.summary)
    with (small_disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    summary(run, cause="no space left")
    assert json.loads(run.summary.read_text())["exit"] == "no space left"
    with pytest.raises(OSError, match="No space left"):
        reserve_space(run.summary)


def test_the_card_has_results_and_config(run: RunDir) -> None:
    card = model_card(run, "Qwen/Qwen2.5-0.5B", summary(run))
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["base_model"], front["library_name"]) == ("Qwen/Qwen2.5-0.5B", "transformers")
    for said in ("| rewards | `math`, `format` |", "| steps | 60 |", "0.250 before, 0.750 after", "from_pretrained"):
        assert said in card
    assert yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])["seed"] == 0
