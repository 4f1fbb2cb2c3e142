"""Equality of answers: a list of difficult pairs, and laws that hold for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tables import table

from grpocli.rewards import math_value, math_worker
from grpocli.rewards.final_answer import LONGEST, answer_expression, chosen_letter, reference_expression

PAIRS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "answer_pairs.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize(
    "pair", table(PAIRS, fast=60), ids=lambda pair: f"{pair['reference']} and {pair['completion']}"[:60]
)
def test_every_pair_of_the_list_is_decided_correctly(pair: dict[str, Any]) -> None:
    assert math_worker.equal(pair["reference"], pair["completion"]) == float(pair["equal"])


def test_the_list_has_equal_and_unequal_pairs_in_every_family() -> None:
    found = Counter((pair["family"], pair["equal"]) for pair in PAIRS)
    assert len({(pair["reference"], pair["completion"]) for pair in PAIRS}) == len(PAIRS) >= 200
    assert {family for family, equal in found if equal} == {family for family, equal in found if not equal}


@pytest.mark.parametrize("reference", table(sorted({pair["reference"] for pair in PAIRS}), fast=20))
def test_every_reference_equals_itself(reference: str) -> None:
    assert math_worker.equal(reference, reference) == 1.0
    boxed = reference_expression(reference).strip("$")
    assert math_worker.equal(reference, f"<think>12345</think> \\boxed{{{boxed}}}") == 1.0


def test_unevaluated_answers_count_without_require_evaluated() -> None:
    assert math_worker.equal("74", r"\boxed{51+23}", require_evaluated=False) == 1.0
    assert math_worker.equal("5050", r"\boxed{\sum_{k=1}^{100} k}", require_evaluated=False) == 1.0


@pytest.mark.parametrize("reference", ["", "  ", "\\boxed{}", "<answer></answer>"])
def test_an_empty_reference_is_an_error(reference: str) -> None:
    with pytest.raises(ValueError, match="no answer in the reference answer") as caught:
        math_worker.equal(reference, "1")
    assert repr(reference) in str(caught.value)


@pytest.mark.parametrize("text", [r"\prod_{k=1}^{100000} k", r"\sum_{k=1}^{100000} \frac{1}{k^3+1}"])
@pytest.mark.parametrize("written", ["{}", "{} = 24", "24 = {}"])
def test_long_sums_and_products_are_not_computed(text: str, written: str) -> None:
    with pytest.raises(math_value.Unreadable, match="too many terms"):
        math_value.number(math_value.parsed(text))
    assert math_worker.equal("24", rf"\boxed{{{written.format(text)}}}", require_evaluated=False) == 0.0


@pytest.mark.parametrize("text", ["10^{10^{10}}", "9^{9^{9^9}}", "(10^7)!", "2^{10000000000}"])
def test_a_number_too_large_to_compute_equals_its_own_text_only(text: str) -> None:
    assert math_worker.equal(text, rf"\boxed{{{text}}}") == 1.0
    assert math_worker.equal(text, rf"\boxed{{{text.replace('9', '8').replace('10', '11')}}}") == 0.0
    assert math_worker.equal(text, r"\boxed{1}") == math_worker.equal("1", rf"\boxed{{{text}}}") == 0.0


@pytest.mark.parametrize(
    "piece",
    [
        *("\\boxed", "\\boxed{", "{", "(", "<answer>", "<think>", "\\text{", "\\text{minus", "\\color{"),
        *("$", "1 ", "1,", "9 and ", "A ", "=", ":"),
    ],
)
def test_a_long_text_takes_bounded_time(piece: str) -> None:
    """Only the last 2,000 characters reach searches that take more than linear time."""
    text = (piece * 20_000)[:20_000]
    assert len(answer_expression(text)) <= LONGEST
    assert math_worker.equal("7", text) == 0.0
    assert len(chosen_letter(text)) <= 1
