"""The warnings of a recorder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpocli.runs.metrics import MetricsLog
from grpocli.runs.run_dir import RunDir
from grpocli.tracking.recorder import Recorder
from grpocli.types import Completion, Group, Prompt, Rollout
from grpocli.views.view import ShownCompletion, View


class Shown(View):
    """Records warnings and completions."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.samples: list[ShownCompletion] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def sample(self, sample: ShownCompletion) -> None:
        self.samples.append(sample)


Made = tuple[Recorder, Shown]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Made]:
    def make(**fields: Any) -> Made:
        view, run = Shown(), RunDir(tmp_path / "a run")
        run.path.mkdir()
        return Recorder(run, view, MetricsLog(run.metrics), None, **fields), view

    return make


def group(columns: dict[str, Any] | None = None) -> Group:
    prompt = Prompt("0", [1], "p", columns or {})
    return Group(prompt, [Rollout(prompt, Completion([1], [-1.0], "stop", version=1), "t", {"r": 1.0})] * 2)


def step(recorder: Recorder, number: int, metrics: dict[str, Any], advantage: float = 0.0, **found: str) -> None:
    recorder.step(number, metrics, [group()], torch.full((1, 2), advantage), found)


@pytest.mark.parametrize(("dtype", "limit", "above"), [("float32", 1.02, 1.021), ("bfloat16", 1.1, 1.101)])
def test_a_mismatch_beyond_rounding_is_shown_once(
    made: Callable[..., Made], dtype: str, limit: float, above: float
) -> None:
    recorder, view = made(dtype=dtype)
    for number, error in enumerate([1.0, limit, above, 1.5], start=1):
        step(recorder, number, {"token_mult_prob_error": error})
    assert len(view.warnings) == 1
    assert f"step 3: token_mult_prob_error is {above:.3f}, above {limit}" in view.warnings[0]


@pytest.mark.parametrize(
    ("error", "stale", "expected", "warning"),
    [(1.15, 1, False, ""), (1.25, 1, False, "lower optim.lr"), (1.5, 0, True, ""), (1.15, 0, False, "float32")],
    ids=["stale", "too stale", "regex", "neither"],
)
def test_other_weights_and_a_regex_explain_a_mismatch(
    made: Callable[..., Made], error: float, stale: int, expected: bool, warning: str
) -> None:
    recorder, view = made(mismatch_expected=expected)
    step(recorder, 2, {"token_mult_prob_error": error, "staleness/max": stale})
    assert len(view.warnings) == bool(warning)
    assert warning in "".join(view.warnings).lower()


def test_each_kind_of_warning_is_shown_once(made: Callable[..., Made]) -> None:
    recorder, view = made()
    for number, found in enumerate([{}, {"bare": "1 of 2"}, {"bare": "2 of 2", "silent": "all"}], start=1):
        step(recorder, number, {}, **found)
    assert view.warnings == ["step 2: 1 of 2", "step 3: all"]


def test_a_step_without_rows_to_train_on_gives_a_warning(made: Callable[..., Made]) -> None:
    recorder, view = made()
    recorder.step(1, {}, [], torch.zeros(0, 2), {})
    assert "trained on nothing: of the groups that algorithm.keep.max_rounds allows" in view.warnings[0]


@pytest.mark.parametrize(
    ("metrics", "advantage", "teacher", "said"),
    [
        ({"completions/clipped_ratio": 1.0}, 0.0, False, "rollout.max_completion_tokens"),
        ({"completions/clipped_ratio": 1.0, "tokens/trained": 0}, 1.0, False, "rollout.max_completion_tokens"),
        ({"rewards/math/std": 0.0}, 0.0, False, "/a run', and choose another reward"),
        ({"rewards/math/std": 0.0}, 1.0, False, ""),
        ({"rewards/math/std": 0.0}, 0.0, True, ""),
    ],
)
def test_three_steps_without_a_signal_are_said_once_with_the_likely_cause(
    made: Callable[..., Made], metrics: dict[str, float], advantage: float, teacher: bool, said: str
) -> None:
    recorder, view = made(has_teacher=teacher)
    for number in range(1, 8):
        step(recorder, number, {"reward": 0.0} | metrics, advantage)
    assert len(view.warnings) == bool(said)
    assert all("step 3: nothing is learned" in text and said in text for text in view.warnings)


def test_the_sample_is_shown_with_the_reference_answer(made: Callable[..., Made]) -> None:
    recorder, view = made(answer_columns=("target", "answer"))
    for number, columns in enumerate([{"target": 24, "answer": "x"}, {"answer": "x"}, {}], start=1):
        recorder.step(number, {}, [group(columns)], torch.zeros(1, 2), {})
    assert [sample.answer for sample in view.samples] == ["24", "x", None]
