"""The warnings of a recorder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from grpocli.runs.metrics import MetricsLog
from grpocli.runs.run_dir import RunDir
from grpocli.tracking.recorder import Recorder
from grpocli.types import Completion, Group, Prompt, Rollout
from grpocli.views.view import ShownCompletion, View


@pytest.mark.parametrize(
    ("dtype", "limit", "above"), [("float32", 1.02, 1.021), ("bfloat16", 1.1, 1.101)], ids=["float32", "bfloat16"]
)
def test_a_mismatch_beyond_rounding_is_shown_once_and_logged_every_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    limit: float,
    above: float,
) -> None:
    view, warnings = View(), list[str]()
    monkeypatch.setattr(view, "warn", warnings.append)
    recorder = Recorder(RunDir(tmp_path), view, MetricsLog(tmp_path / "metrics.jsonl"), None, dtype=dtype)
    done = Completion([1], [-1.0], "stop", version=1)
    prompt = Prompt("0", [1], "p")
    group = Group(prompt, [Rollout(prompt, done, "t", {"r": 1.0})] * 2)
    something = ([group], torch.zeros(1, 2), {})
    with caplog.at_level(logging.WARNING):
        for step, error in enumerate([1.0, limit, above, 1.5], start=1):
            recorder.step(step, {"token_mult_prob_error": error}, *something)
        recorder.step(5, {}, *something)
    assert len(warnings) == 1
    assert f"step 3: token_mult_prob_error is {above:.3f}, above {limit}" in warnings[0]
    assert [r.getMessage() for r in caplog.records] == [
        f"step 3: token_mult_prob_error is {above:.4f}, above {limit}",
        f"step 4: token_mult_prob_error is 1.5000, above {limit}",
    ]


def test_each_kind_of_note_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view, warnings = View(), list[str]()
    monkeypatch.setattr(view, "warn", warnings.append)
    recorder = Recorder(RunDir(tmp_path), view, MetricsLog(tmp_path / "metrics.jsonl"), None)
    done, prompt = Completion([1], [-1.0], "stop", version=1), Prompt("0", [1], "p")
    group = Group(prompt, [Rollout(prompt, done, "t", {"r": 1.0})] * 2)
    for step, found in enumerate([{}, {"bare x": "1 of 2"}, {"bare x": "2 of 2", "silent r": "all"}], start=1):
        recorder.step(step, {}, [group], torch.zeros(1, 2), found)
    assert warnings == ["step 2: 1 of 2", "step 3: all"]


def test_staleness_is_not_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of older weights differ because of the updates since."""
    view, warnings = View(), list[str]()
    monkeypatch.setattr(view, "warn", warnings.append)
    recorder = Recorder(RunDir(tmp_path), view, MetricsLog(tmp_path / "metrics.jsonl"), None)
    done = Completion([1], [-1.0], "stop", version=1)
    prompt = Prompt("0", [1], "p")
    something = ([Group(prompt, [Rollout(prompt, done, "t", {"r": 1.0})] * 2)], torch.zeros(1, 2), {})
    recorder.step(2, {"token_mult_prob_error": 1.5, "staleness/max": 1}, *something)
    assert warnings == []
    recorder.mismatch_expected = True  # a regex or a schema
    recorder.step(3, {"token_mult_prob_error": 1.5, "staleness/max": 0}, *something)
    assert warnings == []
    recorder.mismatch_expected = False
    recorder.step(4, {"token_mult_prob_error": 1.5, "staleness/max": 0}, *something)
    assert len(warnings) == 1


def test_a_step_without_rows_to_train_on_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view, warnings = View(), list[str]()
    monkeypatch.setattr(view, "warn", warnings.append)
    recorder = Recorder(RunDir(tmp_path), view, MetricsLog(tmp_path / "metrics.jsonl"), None)
    recorder.step(1, {"sampling/rounds": 10}, [], torch.zeros(0, 2), {})
    assert len(warnings) == 1
    assert "step 1 trained on nothing: of the groups sampled in 10 rounds, algorithm.keep.max_rounds" in warnings[0]
    recorder.step(2, {"sampling/rounds": 1, "sampling/stale": 4}, [], torch.zeros(0, 2), {})
    assert "step 2 trained on nothing: all 4 groups kept for it were sampled with weights older" in warnings[1]
    assert "reward" not in warnings[1]


@pytest.mark.parametrize(
    ("metrics", "advantage", "teacher", "said"),
    [
        ({"completions/clipped_ratio": 1.0}, 0.0, False, "rollout.max_completion_tokens"),
        ({"completions/clipped_ratio": 1.0, "tokens/trained": 0}, 1.0, False, "rollout.max_completion_tokens"),
        ({"rewards/math/std": 0.0}, 0.0, False, "every completion has the reward 0"),
        ({"rewards/math/std": 0.0}, 0.0, False, "/a run', and choose another reward"),
        ({"rewards/math/std": 0.5}, 0.0, False, "rollout.group_size"),
        ({"rewards/math/std": 0.0}, 1.0, False, ""),
        ({"rewards/math/std": 0.0}, 0.0, True, ""),
    ],
)
def test_steps_without_a_signal_are_said_once_with_the_likely_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metrics: dict[str, float],
    advantage: float,
    teacher: bool,
    said: str,
) -> None:
    view, warnings = View(), list[str]()
    monkeypatch.setattr(view, "warn", warnings.append)
    (tmp_path / "a run").mkdir()
    recorder = Recorder(RunDir(tmp_path / "a run"), view, MetricsLog(tmp_path / "m"), None, has_teacher=teacher)
    done, prompt = Completion([1], [-1.0], "stop", version=1), Prompt("0", [1], "p")
    group = Group(prompt, [Rollout(prompt, done, "t", {"math": 0.0})] * 2)

    def steps(first: int, last: int, advantage: float) -> None:
        for step in range(first, last):
            recorder.step(step, {"reward": 0.0} | metrics, [group], torch.full((1, 2), advantage), {})

    steps(1, 3, advantage)
    assert warnings == []
    steps(3, 8, advantage)
    assert len(warnings) == bool(said)
    assert all("step 3: nothing is learned" in text and said in text for text in warnings)


def test_the_sample_is_shown_with_the_reference_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view, shown = View(), list[ShownCompletion]()
    monkeypatch.setattr(view, "sample", shown.append)
    recorder = Recorder(RunDir(tmp_path), view, MetricsLog(tmp_path / "m"), None, answer_columns=("target", "answer"))
    done = Completion([1], [-1.0], "stop", version=1)
    for step, columns in enumerate([{"target": 24, "answer": "x"}, {"answer": "x"}, {}], start=1):
        prompt = Prompt("0", [1], "p", columns)
        group = Group(prompt, [Rollout(prompt, done, "t", {"r": 1.0})] * 2)
        recorder.step(step, {}, [group], torch.zeros(1, 2), {})
    assert [sample.answer for sample in shown] == ["24", "x", None]
