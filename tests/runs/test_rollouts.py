"""Rollout files contain every completion exactly."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpocli.runs.rollouts import Record, evaluation_records, read_rollouts, write_rollouts
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Row, Status

TALK = [{"role": "user", "content": "Wie groß?"}]


ANSWER = {"answer": "3", "task_name": "sums"}


def group(uid: str, text: object, rewards: list[dict[str, float]], columns: dict[str, Any] = ANSWER) -> Group:
    prompt = Prompt(uid, [1, 2], text, columns)  # type: ignore[arg-type]
    done = [Completion([7, 8 + k], [-0.5, -0.25], "stop" if k else "length", 4) for k in range(len(rewards))]
    return Group(
        prompt, [Rollout(prompt, c, f"text {k}", r) for k, (c, r) in enumerate(zip(done, rewards, strict=True))]
    )


def written(path: Path, *groups: Group, answers: Sequence[str] = ("answer",)) -> list[dict[str, Any]]:
    write_rollouts(path / "rollouts.parquet", evaluation_records(groups), 0, answers)
    return read_rollouts(path / "rollouts.parquet")


FIRST_ROW = {
    **{"step": 3, "sampled_step": 2, "status": "trained", "task": "sums", "uid": "a", "row": None, "group": 0},
    **{"prompt": "1+2=", "messages": None, "completion": "text 0", "episode": None, "turns": None, "answer": "3"},
    **{"columns": '{"answer": "3"}', "prompt_ids": [1, 2], "completion_ids": [7, 8], "length": 2, "loss_mask": [1, 0]},
    **{"logprobs": [-0.5, -0.25], "trainer_logprobs": [-0.75, -0.125], "entropies": [1.5, 0.0], "ratios": None},
    **{"clipped": None, "reward": 1.0, "advantage": 0.75, "finish_reason": "length", "version": 4},
    **{"version_spans": None, "reward/math": 1.0, "reward/format": None, "reward/extra": None},
}


def test_each_completion_has_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000003.parquet"
    first, second = (
        group("a", "1+2=", [{"math": 1.0, "format": math.nan}, {"math": 0.0, "format": 0.5}]),
        group("b", TALK, [{"math": 1.0, "extra": 2.0}, {"math": 1.0, "extra": 3.0}]),
    )
    computed = {"logp": np.array([-0.75, -0.125], np.float32), "entropy": np.array([1.5, 0.0], np.float32)}
    trained = [
        Record(r, 0, Status.TRAINED, 2, reward, Row([1], [7, 8], [1, 0], advantage, 0, [-0.5, -0.25], **computed))
        for r, reward, advantage in zip(first.rollouts, (1.0, 0.5), (0.75, -0.75), strict=True)
    ]
    filtered = [Record(r, 1, Status.FILTERED, 3) for r in second.rollouts]
    write_rollouts(path, [*trained, *filtered], step=3)
    rows = read_rollouts(path)
    assert rows[0] == FIRST_ROW
    assert [row["uid"] for row in rows] == ["a", "a", "b", "b"]
    assert rows[3]["reward/extra"] == 3.0
    left_out = [rows[3][name] for name in ("status", "loss_mask", "trainer_logprobs", "advantage", "reward")]
    assert left_out == ["filtered", [0, 0], None, None, None]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_conversation_is_a_list_of_messages_and_a_readable_text(tmp_path: Path) -> None:
    (row,) = written(tmp_path, group("b", TALK, [{"math": 1.0}]))
    assert row["messages"] == TALK
    assert row["prompt"] == "user: Wie groß?"
    with_tools = [*TALK, {"role": "assistant", "tool_calls": [{"name": "look"}]}]
    (row,) = written(tmp_path, group("b", with_tools, [{"math": 1.0}]))
    assert row["messages"] == [*TALK, {"role": "assistant", "content": ""}]
    assert json.loads(row["columns"])["prompt"] == with_tools, "the list has no field for it"


def test_an_episode_is_a_list_of_messages(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "2*3"}, {"role": "user", "content": "6"}]
    prompt = Prompt("a", [1], "p")
    done = Completion([7, 8, 9], [-1.0, 0.0, -1.0], "stop", 1, [1, 0, 1], episode=Episode(turns, 2))
    (row,) = written(tmp_path, Group(prompt, [Rollout(prompt, done, "2*3", {"math": 1.0})]))
    assert (row["episode"], row["turns"], row["length"]) == (turns, 2, 2)


@pytest.mark.parametrize(
    ("columns", "answers", "reference"),
    [
        ({"answer": 42}, ["answer"], "42"),
        ({"answer": None, "target": 24, "numbers": [1, 2]}, ["answer", "target"], "24"),
        ({"tests": ["assert f(1)"], "answer": "def f"}, ["tests", "answer"], '["assert f(1)"]'),
        ({"level": 3}, ["answer"], None),
        ({}, ["answer"], None),
    ],
)
def test_columns_and_reference_answer_are_the_examples(
    columns: dict[str, Any], answers: list[str], reference: str | None, tmp_path: Path
) -> None:
    (row,) = written(tmp_path, group("a", "p", [{"math": 1.0}], columns), answers=answers)
    assert row["answer"] == reference
    assert json.loads(row["columns"]) == columns


def test_columns_of_any_kind_are_json(tmp_path: Path) -> None:
    columns = {
        "date": datetime.datetime(2024, 1, 2),
        "price": decimal.Decimal("1.50"),
        "array": np.arange(3),
        "one": np.float32(0.5),
        "large": np.zeros((1000, 1000)),
        "raw": b"\x1b[2J",
        "image": SimpleNamespace(pixels=3),
        "none": math.nan,
        "long": "x" * 300_000,
        "nested": {1: [(1, None)], "half": "\ud83d"},
    }
    rows = written(tmp_path, group("a", "p", [{"math": 1.0}], columns), group("b", "p", [{"math": 1.0}], {"date": 3}))
    found = json.loads(rows[0]["columns"])
    long = found.pop("long")
    assert found == {
        "date": "2024-01-02 00:00:00",
        "price": "1.50",
        "array": [0, 1, 2],
        "one": 0.5,
        "large": "<ndarray>",
        "raw": "<4 bytes>",
        "image": "<SimpleNamespace>",
        "none": None,
        "nested": {"1": [[1, None]], "half": "?"},
    }
    assert long.startswith('"xxx')
    assert long.endswith("xxx... (200,002 more characters)")
    assert json.loads(rows[1]["columns"]) == {"date": 3}, "another task's column of the same name"


def test_the_docs_list_every_column_and_status(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()
    (row,) = written(tmp_path, group("a", "p", [{"NAME": 1.0}]))
    documented = set(re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE))))
    assert documented == {*row, *Status}


@pytest.mark.processes
def test_a_full_disk_leaves_no_partial_file(full_disk: Path) -> None:
    (full_disk / "filler").unlink()
    noise = random.Random(0).randbytes(2_000_000).hex()  # does not fit into a MiB, however well compressed
    path = full_disk / "step_000001.parquet"
    with pytest.raises(OSError, match="No space left"):
        write_rollouts(path, evaluation_records([group("a", noise, [{"math": 1.0}])]), step=1)
    assert list(full_disk.iterdir()) == []
