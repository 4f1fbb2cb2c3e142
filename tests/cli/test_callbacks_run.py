"""Whole runs with callbacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.running import SMALL, assert_same_run, finish, metrics, run_here, start

pytestmark = pytest.mark.processes

CODE = """
import json
import time
from pathlib import Path
from grpocli import Callback, StopTraining

def note(*what):
    with Path("seen.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\\n")

class Seen(Callback):
    def on_start(self, run):
        note("start", run.steps, run.done, run.config["seed"], run.folder.name)
    def before_step(self, step):
        note("before", step)
    def after_step(self, step):
        texts = {type(one.completion).__name__ for one in step.completions}
        note("after", step.step, "reward" in step.metrics, len(step.completions), *texts)
    def after_evaluation(self, evaluation):
        note("evaluation", evaluation.step, sorted(evaluation.metrics)[0])
    def after_checkpoint(self, checkpoint):
        note("checkpoint", checkpoint.step, (checkpoint.folder / "trainer.json").is_file())
    def on_end(self, end):
        note("end", end.step, end.outcome, end.model is not None and (end.model / "config.json").is_file())

class Stop(Callback):
    def after_step(self, step):
        if step.step == 2:
            raise StopTraining("enough")

class Broken(Callback):
    def after_step(self, step):
        raise ValueError("broken")
"""
RUN = ["engine=fake", *SMALL, "checkpoint.every=1", "eval.every=2"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def seen(folder: Path) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def test_callbacks_see_the_run_in_order(here: Path) -> None:
    assert run_here("train", *RUN, "callbacks=[mine.py:Seen,mine.py:Broken]", "hydra.run.dir=one") == 0
    assert seen(here) == [
        ["start", 3, 0, 0, "one"],
        ["evaluation", 0, "eval/accuracy"],
        ["before", 1],
        ["after", 1, True, 4, "str"],
        ["before", 2],
        ["checkpoint", 1, True],
        ["evaluation", 2, "eval/accuracy"],
        ["after", 2, True, 4, "str"],
        ["before", 3],
        ["checkpoint", 2, True],
        ["after", 3, True, 4, "str"],
        ["checkpoint", 3, True],
        ["evaluation", 3, "eval/accuracy"],
        ["end", 3, "done", True],
    ]
    assert "mine.py:Broken failed in after_step: ValueError: broken (" in (here / "one" / "run.log").read_text()


@pytest.mark.survival
def test_a_callback_ends_a_run_and_a_resume_goes_on(here: Path) -> None:
    assert run_here("train", *RUN, "callbacks=[mine.py:Stop]", "hydra.run.dir=short") == 0
    summary = json.loads((here / "short" / "summary.json").read_text())
    assert (summary["steps"], summary["exit"]) == (2, "done")
    assert summary["ended_early"] == {"callback": "the callback mine.py:Stop ends the run: enough"}
    assert (here / "short" / "model" / "config.json").is_file()
    assert (here / "short" / "checkpoints" / "step_000002" / "trainer.json").is_file()
    assert run_here("train", "resume=short", "callbacks=[]") == 0
    assert len(metrics(here / "short")) == 3
    assert run_here("train", *RUN, "hydra.run.dir=long") == 0
    assert_same_run(here / "short", here / "long")


@pytest.mark.survival
def test_a_callback_ends_a_run_of_several_processes(here: Path) -> None:
    _, out = finish(start("train", *RUN, "callbacks=[mine.py:Stop,mine.py:Seen]", "hardware.processes=2"), code=0)
    assert out.count("the callback mine.py:Stop ends the run: enough") == 1
    assert [row[0] for row in seen(here)].count("after") == 2  # the main process alone calls it
    assert seen(here)[-1] == ["end", 2, "done", True]
