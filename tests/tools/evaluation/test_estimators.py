"""Estimates equal their definitions, written out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from grpocli.training.accuracy import majority, pass_at_k
from grpocli_tools.evaluation.significance import interval


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
def test_an_interval_covers_the_truth_as_often_as_stated(
    questions: int, samples: int, alike: float, share: float
) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    covered = 0
    for _ in range(500):
        low, high = interval((drawn(generator, share, alike, samples, questions) / samples).tolist())
        covered += low <= share <= high
    assert covered / 500 >= 0.9
