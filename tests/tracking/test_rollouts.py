"""rollouts/*.parquet: every completion, exactly."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from grpocli.data import Completion, Group, Prompt, Rollout
from grpocli.tracking.rollouts import read_rollouts, write_rollouts

TALK = [{"role": "user", "content": "Wie groß?"}]


def group(uid: str, text: object, rewards: list[dict[str, float]]) -> Group:
    prompt = Prompt(uid, [1, 2], text, {"answer": "3", "task_name": "sums"})  # type: ignore[arg-type]
    done = [Completion([7, 8 + k], [-0.5, -0.25], "stop" if k else "length", 4) for k in range(len(rewards))]
    return Group(
        prompt, [Rollout(prompt, c, f"text {k}", r) for k, (c, r) in enumerate(zip(done, rewards, strict=True))]
    )


def test_a_row_a_completion(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000003.parquet"
    groups = [
        group("a", "1+2=", [{"math": 1.0, "format": math.nan}, {"math": 0.0, "format": 0.5}]),
        group("b", TALK, [{"math": 1.0, "extra": 2.0}, {"math": 1.0, "extra": 3.0}]),
    ]
    write_rollouts(path, groups, [[0.75, -0.75], [0.0, 0.0]], step=3)
    rows = read_rollouts(path)
    assert rows[0] == {
        "step": 3,
        "task": "sums",
        "uid": "a",
        "group": 0,
        "prompt": "1+2=",
        "completion": "text 0",
        "prompt_ids": [1, 2],
        "completion_ids": [7, 8],
        "logprobs": [-0.5, -0.25],
        "advantage": 0.75,
        "finish_reason": "length",
        "version": 4,
        "version_spans": None,
        "reward/math": 1.0,
        "reward/format": None,
        "reward/extra": None,
    }
    assert [row["uid"] for row in rows] == ["a", "a", "b", "b"]
    assert json.loads(rows[2]["prompt"]) == TALK
    assert rows[3]["reward/extra"] == 3.0
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_step_that_kept_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000001.parquet"
    write_rollouts(path, [], [], step=1)
    assert read_rollouts(path) == []


def test_text_that_is_no_unicode(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000001.parquet"
    write_rollouts(path, [group("a", "half \ud83d of a face", [{"math": 1.0}])], [[0.0]], step=1)
    assert read_rollouts(path)[0]["prompt"] == "half ? of a face"


def test_a_full_disk_leaves_no_half_file(full_disk: Path) -> None:
    (full_disk / "filler").unlink()
    noise = random.Random(0).randbytes(2_000_000).hex()  # more than a MiB can hold, however well compressed
    path = full_disk / "step_000001.parquet"
    with pytest.raises(OSError, match="No space left"):
        write_rollouts(path, [group("a", noise, [{"math": 1.0}])], [[0.0]], step=1)
    assert list(full_disk.iterdir()) == []
