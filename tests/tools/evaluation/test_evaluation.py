"""Estimates equal their definitions, the paired test has exact p-values and power, and results follow from samples."""

from __future__ import annotations

import itertools
import json
import math
from itertools import combinations

import numpy as np
import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.rewards.reward import Sample
from grpocli.rewards.rule_based import Math, Number
from grpocli.tasks.prompt_source import doubtful_choices
from grpocli.training.accuracy import AccuracyRewards, majority, pass_at_k
from grpocli.types import Completion, Group, Prompt, Rollout
from grpocli_tools.evaluation.evaluate import TaskResult
from grpocli_tools.evaluation.significance import Paired, interval, sign_flip_p, t_95


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        outcomes = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            choices = list(combinations(outcomes, k))
            assert pass_at_k(right, samples, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("votes", "right", "expected"),
    [
        ("aab", [1, 1, 0], 1.0),
        ("abb", [1, 0, 0], 0.0),
        ("ab", [1, 0], 0.5),
        ("aabbc", [1, 1, 0, 0, 1], 0.5),
        ("aab", [1, 0, 0], 0.5),
        ("a", [1], 1.0),
    ],
)
def test_the_majority_is_the_most_frequent_answer(votes: str, right: list[int], expected: float) -> None:
    assert majority(list(votes), [bool(one) for one in right]) == expected


def wilson(right: int, n: int) -> tuple[float, float]:
    """Each p with |right / n - p| = 1.96 standard errors at p: the roots of a quadratic equation."""
    z2, share = 1.959963984540054**2, right / n
    low, high = np.sort(np.roots([1 + z2 / n, -(2 * share + z2 / n), share**2]).real)
    return float(low), float(high)


@pytest.mark.parametrize(("right", "n"), [(0, 1), (0, 10), (1, 30), (3, 100), (15, 30), (29, 30), (10, 10)])
def test_an_interval_of_0_and_1_is_wilsons(right: int, n: int) -> None:
    assert interval([1.0] * right + [0.0] * (n - right)) == pytest.approx(wilson(right, n), abs=1e-7)


def drawn(generator: np.random.Generator, share: float, alike: float, samples: int, questions: int) -> np.ndarray:
    """The number of right samples of each question. alike: the correlation of two samples of one question, 0 to 1."""
    spread = (1 - alike) / alike
    chances = generator.beta(share * spread, (1 - share) * spread, questions)
    return generator.binomial(samples, chances)


@pytest.mark.parametrize("share", [0.03, 0.3, 0.95])
@pytest.mark.parametrize(
    ("questions", "samples", "alike"), [(10, 16, 0.3), (30, 1, 0.5), (30, 4, 0.1), (30, 4, 0.8), (100, 16, 0.3)]
)
def test_an_interval_covers_the_truth_as_often_as_stated(questions: int, samples: int, alike, share: float) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    covered = 0
    for _ in range(500):
        low, high = interval((drawn(generator, share, alike, samples, questions) / samples).tolist())
        covered += low <= share <= high
    assert covered / 500 >= 0.9


def enumerated(differences: list[float]) -> float:
    """The mid-p value by all signs."""
    seen = abs(sum(differences))
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=len(differences))]
    return sum(1.0 if one > seen + 1e-9 else 0.5 if one > seen - 1e-9 else 0.0 for one in sums) / len(sums)


SHARES = [[0.25, 0.25, 0.5, -0.25, 0.0, 1.0], [1 / 3, -1 / 3, 2 / 3, 1.0, 0.25], [-0.25] * 8, [0.0, 0.0], [1.0]]


@pytest.mark.parametrize("differences", [*SHARES, [3 / 16, 5 / 16, -1 / 16, 0.5, 0.25, 7 / 16]])
def test_the_p_value_is_that_of_all_signs(differences: list[float]) -> None:
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences) if any(differences) else 1.0, abs=1e-9)


def test_values_that_are_no_shares_are_rounded_to_a_fine_grid() -> None:
    differences = np.random.default_rng(0).normal(0.3, 1.0, 12).tolist()
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences), abs=0.01)


def test_the_sum_of_many_values_is_taken_for_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(0).gamma(1.0, 1.0, 400) - 0.92
    normal = sign_flip_p(differences.tolist())
    monkeypatch.setattr("grpocli_tools.evaluation.significance.MANY", 400)
    assert normal == pytest.approx(sign_flip_p(differences.tolist()), abs=0.002)


def found(shift: float, runs: int) -> float:
    """The share of pairs of evaluations of 32 problems x 4 that differ clearly, where the accuracy rises by a shift."""
    random = np.random.default_rng(1)
    clear = 0
    for _ in range(runs):
        rates = random.beta(0.5, 1.5, 32)
        before, after = (random.binomial(4, np.clip(one, 0, 1)) / 4 for one in (rates, rates + shift))
        paired = Paired.of(dict(enumerate(before)), dict(enumerate(after)))  # type: ignore[arg-type]
        clear += paired is not None and paired.clear
    return clear / runs


def test_a_rise_by_a_fifth_is_found_and_noise_is_not() -> None:
    assert found(0.2, 400) > 0.8
    assert found(0.0, 2000) < 0.015


def test_problems_that_only_one_evaluation_has_do_not_count() -> None:
    paired = Paired.of({"a": 0.0, "b": 0.5}, {"a": 0.5, "c": 1.0})
    assert (paired.change, paired.problems) == (0.5, 1)
    assert Paired.of({"a": 0.0}, {"b": 1.0}) is None


def test_quantiles_of_student_t() -> None:
    known = {1: 12.706, 4: 2.776, 10: 2.228, 11: 2.201, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0, 120: 1.98}
    assert {freedom: round(t_95(freedom), 3) for freedom in known} == known


NAN = math.nan
BOTH = ["reward=[format,number]"]
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
        (BOTH, ["format"]),
        ([*BOTH, "eval.reward=number"], []),
        ([*BOTH, "eval.reward=format"], []),
        (["reward=[format,overlong]"], []),
        (["task=[arithmetic,letter_counting]", *BOTH, "task.letter_counting.rewards=[number]"], ["format"]),
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
