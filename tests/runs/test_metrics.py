"""metrics.jsonl is valid JSON, has one line per step, and can be read after a cut at any byte."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpocli.errors import ConfigError
from grpocli.runs.metrics import MetricsLog, json_line, read_metrics


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_each_step_has_one_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"reward": 0.5, "loss": math.nan, "kl": math.inf, "a": 1})
    log.append(2, {"reward": 1.0})
    first, second = log.path.read_text().splitlines()
    assert first == '{"step": 1, "a": 1, "kl": null, "loss": null, "reward": 0.5}'
    assert json.loads(second) == {"step": 2, "reward": 1.0}


def test_a_resume_truncates_later_steps(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.truncate_after(3)
    assert not log.path.exists()
    rows = [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (4, 0.4)]
    log.path.write_text("".join(json_line(step, {"reward": r}) for step, r in rows) + '{"step": 5, "rew')
    log.truncate_after(3)
    assert [(row["step"], row["reward"]) for row in read_metrics(log.path)] == [(1, 0.1), (2, 0.25), (3, 0.3)]
    log.append(4, {"reward": 0.5})
    assert steps(log.path) == [1, 2, 3, 4]


@given(cut=st.integers(min_value=0), resume_at=st.integers(min_value=0, max_value=6))
def test_a_resume_continues_after_a_cut_at_any_byte(
    tmp_path_factory: pytest.TempPathFactory, cut: int, resume_at: int
) -> None:
    log = MetricsLog(tmp_path_factory.mktemp("run") / "metrics.jsonl")
    whole = "".join(json_line(step, {"reward": step / 7, "note": "päper"}) for step in range(1, 6)).encode()
    log.path.write_bytes(whole[: cut % (len(whole) + 1)])
    survived = steps(log.path)
    assert survived == list(range(1, len(survived) + 1))
    log.truncate_after(resume_at)
    assert steps(log.path) == [s for s in survived if s <= resume_at]
    log.append(9, {})
    assert steps(log.path)[-1] == 9


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json_line(1, {}) + "oops\n" + json_line(2, {}))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 2 is not a JSON object"):
        read_metrics(path)


@pytest.mark.processes
def test_a_full_disk_keeps_the_lines_before(small_disk: Path) -> None:
    log = MetricsLog(small_disk / "metrics.jsonl")

    def write() -> None:
        for step in range(1, 1000):
            log.append(step, {"text": "x" * 5000})

    with pytest.raises(OSError, match="No space left"):
        write()
    assert steps(log.path) == list(range(1, len(steps(log.path)) + 1))


def test_a_later_evaluation_is_added_to_its_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"loss": 1.0, "eval/accuracy": 0.5})
    log.append(2, {"loss": 2.0})
    whole = log.path.read_text()
    log.amend(2, {"eval/accuracy": 0.75})
    assert read_metrics(log.path)[-1] == {"step": 2, "loss": 2.0, "eval/accuracy": 0.75}
    assert log.path.read_text().startswith(whole.splitlines()[0] + "\n")
