"""metrics.jsonl, rollouts and the summary."""

from __future__ import annotations

import json
import math
from pathlib import Path

from grpocli.data import Completion, Group, Prompt, Rollout
from grpocli.tracking.metrics import MetricsLog, read
from grpocli.tracking.rollouts import read_rollouts, write_rollouts
from grpocli.tracking.summary import write_summary


def test_a_line_a_step_of_valid_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"reward": 0.5, "kl": math.nan, "a": 1})
    log.append(2, {"reward": math.inf})
    lines = log.path.read_text().splitlines()
    assert lines[0] == '{"step": 1, "a": 1, "kl": null, "reward": 0.5}'
    assert json.loads(lines[1]) == {"step": 2, "reward": None}


def test_a_resume_neither_doubles_nor_keeps_torn_steps(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append(step, {"reward": step / 10})
    with log.path.open("a") as file:
        file.write('{"step": 6, "rew')
    assert [row["step"] for row in read(log.path)] == [1, 2, 3, 4, 5]
    log.truncate_after(3)
    log.append(4, {"reward": 9.0})
    assert [(row["step"], row["reward"]) for row in read(log.path)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 9.0)]


def test_rollouts_are_kept_as_sampled(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    done = Completion([5, 6], [-0.5, -1.5], "stop", version=3)
    group = Group(
        Prompt("7", [1, 2], chat, {"answer": "x"}),
        [Rollout(Prompt("7", [1, 2], chat), done, "text", {"math": 1.0, "format": math.nan})] * 2,
    )
    path = tmp_path / "rollouts" / "step_000001.parquet"
    write_rollouts(path, [group], [[0.5, -0.5]], step=1)
    first, second = read_rollouts(path)
    assert json.loads(first["prompt"]) == chat
    assert (first["completion"], first["completion_ids"], first["logprobs"]) == ("text", [5, 6], [-0.5, -1.5])
    assert (first["reward/math"], first["reward/format"]) == (1.0, None)
    assert (first["advantage"], second["advantage"]) == (0.5, -0.5)
    assert (first["uid"], first["version"], first["finish_reason"], first["step"]) == ("7", 3, "stop", 1)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_step_that_kept_nothing_writes_an_empty_table(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r" / "step_000002.parquet", [], [], step=2)
    assert read_rollouts(tmp_path / "r" / "step_000002.parquet") == []


def test_summary(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(
        path,
        steps=3,
        seconds=1.26,
        before={"eval/accuracy": 0.1},
        after={"eval/accuracy": 0.5},
        metrics={"loss": math.nan},
        cause="done",
    )
    assert json.loads(path.read_text()) == {
        "steps": 3,
        "seconds": 1.3,
        "exit": "done",
        "eval/accuracy_before": 0.1,
        "eval/accuracy": 0.5,
        "last": {"loss": None},
    }
