"""sessions.jsonl: which session trained which steps of the final model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import (
    Session,
    add_session,
    incomparable_since,
    steps_by_session,
)

LR = {"optim.lr": (1e-3, 5e-4)}
BACK = {"optim.lr": (5e-4, 1e-3)}
SEED = {"seed": (0, 1)}

TOLD: dict[str, tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, int, dict[str, Any]]]]] = {
    "one session": ([(0, {})], [(1, 60, {})]),
    "one after the other": ([(0, {}), (20, LR), (40, {})], [(1, 20, {}), (21, 40, LR), (41, 60, {})]),
    "what a crash has lost was trained again": ([(0, {}), (20, LR), (20, {})], [(1, 20, {}), (21, 60, LR)]),
    "a change that no step was trained with": ([(0, {}), (20, LR), (20, BACK)], [(1, 20, {}), (21, 60, {})]),
    "two changes in a row": ([(0, {}), (20, LR), (20, SEED)], [(1, 20, {}), (21, 60, LR | SEED)]),
    "a newer checkpoint was damaged": ([(0, {}), (40, LR), (20, SEED)], [(1, 20, {}), (21, 60, LR | SEED)]),
    "it began before sessions were recorded": ([(20, LR)], [(1, 20, {}), (21, 60, LR)]),
    "none was recorded": ([], [(1, 60, {})]),
}


@pytest.mark.parametrize("kind", TOLD)
def test_each_session_has_its_steps(kind: str, tmp_path: Path) -> None:
    started, trained = TOLD[kind]
    run = RunDir(tmp_path)
    for step, changes in started:
        add_session(run, Session.now(step, changes))
    found = steps_by_session(SavedRun(tmp_path).sessions, 60)
    assert [(one.first, one.last, one.changes) for one in found] == trained


@pytest.mark.parametrize(
    ("key", "since"), [("reward.python.function", 20), ("reward.other.function", -1), ("task.path", -1), ("model", -1)]
)
def test_an_edited_reward_changes_what_is_measured(key: str, since: int) -> None:
    sessions = [Session(step, "day", {}, inputs={key: digest}) for step, digest in ((0, "a"), (10, "a"), (20, "b"))]
    found, why = incomparable_since(sessions, {"python"})
    assert (found, why) == (since, f"{key} a -> b" if since >= 0 else "")


def test_broken_lines_are_ignored(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    add_session(run, Session.now(0, {}, run="abc"))
    whole = run.sessions.read_bytes()
    run.sessions.write_bytes(b'\xff\x00[[[\n{"step": 3}\n[1]\n' + whole)
    saved = SavedRun(tmp_path)
    assert [one.step for one in saved.sessions] == [0]
    assert (saved.id, saved.problems) == ("abc", ["sessions.jsonl: line 1, 2, 3 cannot be read"])
