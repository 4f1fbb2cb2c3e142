"""Equality of answers: a list of difficult pairs, and laws that hold for it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tables import table

from grpocli.answers import math_value, math_worker
from grpocli.answers.final_answer import LONGEST, answer_expression, chosen_letter, reference_expression

PAIRS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "answer_pairs.jsonl").read_text("utf-8").splitlines()
]
FAMILIES = sorted({pair["family"] for pair in PAIRS})


@pytest.mark.parametrize("family", table(FAMILIES, fast=4))
def test_every_pair_of_the_list_is_decided_correctly(family: str) -> None:
    pairs = [pair for pair in PAIRS if pair["family"] == family]
    wrong = [p for p in pairs if math_worker.equal(p["reference"], p["completion"]) != float(p["equal"])]
    assert not wrong, "\n".join(map(str, wrong))
    assert {pair["equal"] for pair in pairs} == {True, False}


def test_every_pair_of_the_list_is_there_once() -> None:
    assert len({(pair["reference"], pair["completion"]) for pair in PAIRS}) == len(PAIRS) >= 1500


@pytest.mark.slow
def test_every_reference_equals_itself() -> None:
    wrong = []
    for reference in {pair["reference"] for pair in PAIRS}:
        boxed = f"<think>12345</think> \\boxed{{{reference_expression(reference).strip('$')}}}"
        wrong += [text for text in (reference, boxed) if math_worker.equal(reference, text) != 1.0]
    assert not wrong, "\n".join(wrong)


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
        math_value.number(math_value.parse_latex(text))
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
        *("$", "1 ", "1,", "9 and ", "A ", "=", ":", "a", "a ", "ab, ", "$a", "$a$", "$a$, ", "a1"),
    ],
)
def test_a_long_text_takes_bounded_time(piece: str) -> None:
    """Only the last 2,000 characters reach searches that take more than linear time."""
    math_worker.equal("7", "x")  # sympy is loaded
    for text in ((piece * 20_000)[:20_000], f"${(piece * 20_000)[:20_000]}$"):
        begin = time.process_time()
        assert len(answer_expression(text)) <= 2 * LONGEST
        assert math_worker.equal("7", text) == 0.0
        assert len(chosen_letter(text)) <= 1
        assert time.process_time() - begin < 3
