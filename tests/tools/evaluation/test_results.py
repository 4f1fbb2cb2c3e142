"""The numbers of an evaluation, from its samples."""

from __future__ import annotations

import json
import math

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.rewards.math import Math
from grpocli.rewards.reward import Sample
from grpocli.rewards.text_match import Number
from grpocli.tasks.prompt_source import doubtful_choices
from grpocli.training.accuracy import AccuracyRewards
from grpocli.types import Completion, Group, Prompt, Rollout
from grpocli_tools.evaluation.evaluate import TaskResult

NAN = math.nan
ACCURACY = AccuracyRewards({"": "right"}, {"right": Number()})


def group(uid: str, texts: list[str], scores: list[float], finish: str = "stop") -> Group:
    prompt = Prompt(uid, [1], "?")
    done = Completion([1, 2], [0.0, 0.0], finish, 1)
    return Group(prompt, [Rollout(prompt, done, t, {"right": s}) for t, s in zip(texts, scores, strict=True)])


def test_each_number_follows_its_definition() -> None:
    greedy = [group("a", ["1"], [1.0]), group("b", ["2"], [0.0]), group("c", ["3"], [NAN])]
    sampled = [
        group("a", ["1", "it is 1", "2"], [1.0, 1.0, 0.5]),
        group("b", ["1", "2", "2"], [2.0, 0.0, 0.0], finish="length"),
        group("c", ["?", "?", "?"], [NAN, NAN, NAN]),
    ]
    found = TaskResult.of("sums", ACCURACY, greedy, sampled, 8)
    assert (found.questions, found.failed, found.mean_length) == (2, 4, 2.0)
    assert found.truncated == pytest.approx(3 / 12)
    values = {name: score.value for name, score in found.scores.items()}
    assert values == pytest.approx(
        {"greedy": 0.5, "mean@3": 0.5, "pass@2": (1 + 2 / 3) / 2, "pass@3": 1.0, "maj@3": 0.5}
    )
    assert all(score.low <= score.value <= score.high for score in found.scores.values())


def test_results_without_a_score_are_null_in_json() -> None:
    found = TaskResult.of("sums", ACCURACY, [group("a", ["1"], [NAN])], [], 8)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["scores"]["greedy"]["value"] is None


@pytest.mark.parametrize(
    ("overrides", "doubted"),
    [
        (["reward=[format,number]"], ["format"]),
        (["reward=[format,number]", "eval.reward=number"], []),
        (["reward=[format,number]", "eval.reward=format"], []),
        (["reward=[format,overlong]"], []),
        (
            ["task=[arithmetic,letter_counting]", "reward=[format,number]", "task.letter_counting.rewards=[number]"],
            ["format"],
        ),
    ],
)
def test_a_first_reward_that_does_not_decide_is_doubted(overrides: list[str], doubted: list[str]) -> None:
    assert list(doubtful_choices(build_run(compose(overrides)))) == doubted


@pytest.mark.processes
def test_a_majority_is_of_values_and_not_of_texts() -> None:
    """A half in three forms, two of them right by the reward's score, outvotes two equal wrong texts."""
    reward = Math(workers=1, timeout=20)
    accuracy_rewards = AccuracyRewards({"": "right"}, {"right": reward})
    texts = ["\\boxed{0.5}", "so $\\frac12$", "<think>9</think><answer>1/2</answer>", "\\boxed{9}", "9 (apples)"]
    try:
        found = TaskResult.of("sums", accuracy_rewards, [], [group("a", texts, [1.0, 1.0, 1.0, 0.0, 0.0])], 8)
        samples = [Sample.of(rollout, 8) for rollout in group("a", texts, [0.0] * 5).rollouts]
        votes = reward.votes(samples)
    finally:
        reward.close()
    assert found.scores["maj@5"].value == 1.0
    assert votes[0] == votes[1] == votes[2] != votes[3] == votes[4]
