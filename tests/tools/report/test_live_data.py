"""The data of a live page: when it is sent again, and what is not read."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli_tools.report.build_page import Builder
from grpocli_tools.report.live_server import LiveData
from grpocli_tools.report.report_page import page_json


def row(step: int, **more: Any) -> str:
    return json.dumps({"step": step, "reward": step / 10, "time/step": 1.0, **more}) + "\n"


def add(run: Path, *lines: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(lines)


def make_run(path: Path, steps: int = 3) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 0\ntrain:\n  steps: 10\neval:\n  problems: 100\n  samples: 4\n")
    add(path, *(row(step) for step in range(1, steps + 1)))
    return path


def no_formula(run: SavedRun) -> list[str]:
    return ["J = 1"]


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., LiveData]:
    def made(*folders: Path) -> LiveData:
        return LiveData(
            folders or (tmp_path,), Builder(no_formula, live=True).page, clock=itertools.count(0, 100).__next__
        )

    return made


def answer(value: Any) -> Any:
    return None if value is None else json.loads(page_json(value))


def test_a_page_is_sent_once_and_again_when_it_changes(live: Callable[..., LiveData], tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    data = live()
    whole = answer(data.newer())
    assert whole["runs"][0]["steps"] == [1, 2, 3]
    assert data.newer(whole["tag"]) is None
    add(run, row(4), row(5))
    news = answer(data.newer(whole["tag"]))
    assert news["runs"][0]["steps"] == [1, 2, 3, 4, 5]
    assert ["steps", "5 of 10"] in news["runs"][0]["facts"]
    (run / "new").write_text(row(1) + row(2, reward=7))  # a resume that cuts the run back
    (run / "new").rename(run / "metrics.jsonl")
    assert answer(data.newer(news["tag"]))["runs"][0]["metrics"]["reward"] == [0.1, 7]


def test_steps_logged_while_the_page_is_built_again_are_not_lost(tmp_path: Path) -> None:
    run, build = make_run(tmp_path / "a"), Builder(no_formula, live=True).page
    meanwhile: list[str] = []

    def load(folders: Any) -> Any:
        page = build(folders)
        add(run, *meanwhile)
        return page

    data = LiveData([tmp_path], load, clock=itertools.count(0, 100).__next__)
    data.newer()
    add(run, row(4))
    meanwhile.append(row(5))
    data.newer()
    meanwhile.clear()
    assert answer(data.newer())["runs"][0]["steps"] == [1, 2, 3, 4, 5]


def test_a_torn_line_of_a_running_run_waits_for_its_end(live: Callable[..., LiveData], tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with RunDir(run).locked():
        data = live()
        tag = answer(data.newer())["tag"]
        line = row(4)
        add(run, line[:20])
        assert data.newer(tag) is None
        add(run, line[20:])
        assert answer(data.newer(tag))["runs"][0]["steps"] == [1, 2, 3, 4]


def test_a_folder_is_waited_for_and_a_deleted_run_is_a_note(live: Callable[..., LiveData], tmp_path: Path) -> None:
    data = live(tmp_path / "later")
    first = answer(data.newer())
    assert first["runs"] == []
    assert "waiting for a run" in first["notes"][0]
    make_run(tmp_path / "later" / "a"), make_run(tmp_path / "later" / "b")
    assert [run["name"] for run in answer(data.newer(first["tag"]))["runs"]] == ["a", "b"]
    shutil.rmtree(tmp_path / "later" / "a")
    whole = answer(data.newer())
    assert [run["name"] for run in whole["runs"]] == ["b"]
    assert whole["notes"][0] == "a: its folder is not there any more"
