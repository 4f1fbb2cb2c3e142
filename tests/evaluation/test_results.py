"""The numbers of an evaluation from what was sampled."""

from __future__ import annotations

import json
import math

import pytest

from grpocli.data import Completion, Group, Prompt, Rollout
from grpocli.evaluation.results import Judges, task_result
from grpocli.rewards.pooled import Math, last_box
from grpocli.rewards.scoring import sample_of
from grpocli.rewards.text import Number

NAN = math.nan
JUDGES = Judges({"": "right"}, {"right": Number()})


def group(uid: str, texts: list[str], scores: list[float], finish: str = "stop") -> Group:
    prompt = Prompt(uid, [1], "?")
    done = Completion([1, 2], [0.0, 0.0], finish, 1)
    return Group(prompt, [Rollout(prompt, done, t, {"right": s}) for t, s in zip(texts, scores, strict=True)])


def test_each_score_by_its_definition() -> None:
    greedy = [group("a", ["1"], [1.0]), group("b", ["2"], [0.0]), group("c", ["3"], [NAN])]
    sampled = [
        group("a", ["1", "it is 1", "2"], [1.0, 1.0, 0.5]),
        group("b", ["1", "2", "2"], [2.0, 0.0, 0.0], finish="length"),
        group("c", ["?", "?", "?"], [NAN, NAN, NAN]),
    ]
    found = task_result("sums", JUDGES, greedy, sampled, 8)
    assert (found.questions, found.failed, found.mean_length) == (2, 4, 2.0)
    assert found.truncated == pytest.approx(3 / 12)
    values = {name: score.value for name, score in found.scores.items()}
    assert values == pytest.approx(
        {"greedy": 0.5, "mean@3": 0.5, "pass@2": (1 + 2 / 3) / 2, "pass@3": 1.0, "maj@3": 0.5}
    )
    assert all(score.low <= score.value <= score.high for score in found.scores.values())


def test_nothing_judged_is_null_in_json() -> None:
    found = task_result("sums", JUDGES, [group("a", ["1"], [NAN])], [], 8)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["scores"]["greedy"]["value"] is None


@pytest.mark.parametrize(
    ("text", "box"),
    [
        *((r"so \boxed{42}. Or {x}", "42"), (r"\boxed{\frac{1}{2}} and", r"\frac{1}{2}"), ("none", None)),
        *((r"\boxed{1} then \boxed{ 2 }", "2"), (r"\boxed{1", None)),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_what_an_answer_votes_for() -> None:
    def vote(text: str) -> str:
        return Math().vote(sample_of(group("a", [text], [0.0]).rollouts[0], 8))

    assert [vote(text) for text in (r"\boxed{7}", "work\n#### 8", "that is 1,009 in all", "x + y ")] == [
        "7",
        "8",
        "1009",
        "x + y",
    ]
