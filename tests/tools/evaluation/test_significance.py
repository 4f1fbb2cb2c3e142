"""The paired test: exact p-values, few false alarms, and power. Intervals of means over seeds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grpocli_tools.evaluation.significance import Paired, mean_text, sign_flip_p, t_95


def enumerated(differences: list[float]) -> float:
    """The mid-p value by all signs."""
    seen = abs(sum(differences))
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=len(differences))]
    return sum(1.0 if one > seen + 1e-9 else 0.5 if one > seen - 1e-9 else 0.0 for one in sums) / len(sums)


@pytest.mark.parametrize(
    "differences",
    [
        [0.25, 0.25, 0.5, -0.25, 0.0, 1.0],
        [1 / 3, -1 / 3, 2 / 3, 1.0, 0.25],
        [-0.25] * 8,
        [0.0, 0.0],
        [1.0],
        [3 / 16, 5 / 16, -1 / 16, 0.5, 0.25, 7 / 16],
    ],
)
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
    assert paired is not None
    assert (paired.change, paired.problems) == (0.5, 1)
    assert Paired.of({"a": 0.0}, {"b": 1.0}) is None


def test_quantiles_of_student_t() -> None:
    known = {1: 12.706, 4: 2.776, 10: 2.228, 11: 2.201, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0, 120: 1.98}
    assert {freedom: round(t_95(freedom), 3) for freedom in known} == known


def test_a_mean_over_seeds_has_its_95_percent_interval() -> None:
    assert mean_text([0.1, 0.2, 0.3]) == "0.200 ± 0.248"
