"""Plans beside published figures: the costs are those that the rule's half of the rows gives."""

from __future__ import annotations

import sys
from dataclasses import astuple
from pathlib import Path
from types import ModuleType

import pytest

from grpocli.plan.efficiency import COSTS, DECODE_COSTS


@pytest.fixture(scope="module")
def plans() -> ModuleType:
    folder = str(Path(__file__).parents[2] / "bench")
    sys.path.insert(0, folder)
    try:
        import plans
    finally:
        sys.path.remove(folder)
    return plans


def test_the_rule_judges_half_of_the_rows_and_no_fitted_one(plans: ModuleType) -> None:
    for table in ("training", "steps"):
        rows = plans.PUBLISHED[table]["rows"]
        fit, judged = plans.halves(rows)
        assert len(fit) + len(judged) == len(rows)
        assert not {row["name"] for row in fit} & {row["name"] for row in judged}
        assert 0.4 <= len(fit) / len(rows) <= 0.6


@pytest.mark.survival
def test_the_fit_gives_the_costs_of_the_program(plans: ModuleType, tmp_path: Path) -> None:
    fit, _ = plans.halves(plans.PUBLISHED["training"]["rows"])
    found = plans.fit_training(fit, tmp_path)
    assert astuple(found) == pytest.approx(astuple(COSTS["cuda"]), rel=0.01, abs=1e-4)


@pytest.mark.survival
def test_most_judged_rows_are_within_the_stated_factor(plans: ModuleType, tmp_path: Path) -> None:
    costs = COSTS["cuda"]
    _, judged = plans.halves(plans.PUBLISHED["training"]["rows"])
    ratios = [plans.demand_of(row, tmp_path).seconds(costs) / row["seconds"] for row in judged]
    assert sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios) >= 0.9 * len(ratios)
    assert DECODE_COSTS["cuda"].reading >= 1, "no faster than the memory"
