"""Estimates against their definitions, written out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from grpocli.evaluation.estimators import interval, majority, pass_at_k


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_have_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        outcomes = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            choices = list(combinations(outcomes, k))
            assert pass_at_k(right, samples, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    for k in (0, samples + 1):
        with pytest.raises(ValueError, match=f"pass@{k} of {samples}"):
            pass_at_k(0, samples, k)


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
def test_the_majoritys_answer(votes: str, right: list[int], expected: float) -> None:
    assert majority(list(votes), [bool(one) for one in right]) == expected


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    covered = 0
    for trial in range(200):
        low, high = interval(generator.random(100) < 0.3, seed=trial)
        covered += low <= 0.3 <= high
    assert 0.90 <= covered / 200 <= 0.99
    assert interval([1.0] * 10) == (1.0, 1.0)
