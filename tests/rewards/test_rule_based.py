"""The rewards math, exact_match and number on accepted answers."""

from __future__ import annotations

import math
import time
from decimal import Decimal

import numpy as np
import pytest

from grpocli.errors import ConfigError
from grpocli.rewards.reward import Correctness, Failure, read_written
from grpocli.rewards.rule_based import ExactMatch, Math, Number


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (["5", "6"], ["5", "6", "\\boxed{6}"], ["7", "56"]),
        ([5, 6.0], ["5", "6"], ["56"]),
        ([["5"], None, ""], ["5"], ["None", ""]),
        (np.array([5, 6]), ["5", "6"], ["56"]),
        ('["5", "6"]', ["5", "6", "\\boxed{6}"], ["7", "56"]),  # lists as a .csv has them
        ("['5', '6']", ["5", "6"], ["56"]),
        ("['5' '6']", ["5", "6"], ["56"]),
        ("array(['5', '6'], dtype=object)", ["5", "6"], ["56"]),
        (4.0, ["4", "4.0", "4.00"], ["40", "4.1"]),
        (4, ["4", "4.0"], ["5"]),
        (0.1 + 0.2, ["0.3", "3/10"], ["0.31"]),
        (Decimal("2.50"), ["2.5", "2.50"], ["25"]),
    ],
)
@pytest.mark.parametrize("reward", [ExactMatch(), Number(), Math(workers=1, timeout=20)], ids=lambda r: r.label)
def test_any_accepted_answer_is_right_and_numbers_are_numbers(
    sample, reward: Correctness, answer: object, right: list[str], wrong: list[str]
) -> None:
    texts = [*right, *wrong]
    assert reward([sample(text, answer=answer) for text in texts]) == [1] * len(right) + [0] * len(wrong)


def test_a_list_as_text_may_itself_be_the_answer_and_one_of_numbers_is_no_list(sample) -> None:
    texts = [
        ("['a', 'b']", "['a', 'b']"),
        ("[5, 6]", "[5, 6]"),
        ("5", "[5, 6]"),
        ("[]", "[]"),
        ("it's", '["it\'s", 5]'),
    ]
    assert ExactMatch()([sample(text, answer=answer) for text, answer in texts]) == [1, 1, 0, 1, 0]


def test_exact_match_reads_truth_values_and_leaves_texts_as_they_are(sample) -> None:
    given = [("true", True), ("True", True), ("false", True), ("FALSE", False), ("yes", True), ("True", "true")]
    given += [("7", "007"), ("4", "4.0"), ("Paris", ["paris", "Paris"])]
    scores = [1, 1, 0, 1, 0, 0, 0, 0, 1]
    assert ExactMatch()([sample(text, answer=answer) for text, answer in given]) == scores


@pytest.mark.parametrize("answer", [[], [None, ""], math.nan, {"text": ["5"]}, [{"text": "5"}]])
def test_an_answer_without_a_value_is_a_failure(sample, answer: object) -> None:
    for reward in (ExactMatch(), Number()):
        (score,) = reward([sample("5", answer=answer)])
        assert isinstance(score, Failure)


def test_a_missing_answer_column_is_found_before_training() -> None:
    with pytest.raises(ConfigError, match=r"reward\.number\.answer_column=answer: .*did you mean \"answers\""):
        Number().check(["answers", "level"])
    Number(answer_column="answers").check(["answers"])


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("so 3 + 4 = 7", "7", 1.0),
        ("it costs $1,234.50 in all", "1234.5", 1.0),
        ("5 - 8 = -3", "-3", 1.0),
        ("5 - 8 = −3", "-3", 1.0),
        ("-$5", "-5", 1.0),
        ("7 or 8", "7", 0.0),
        ("3", "-3", 0.0),
        ("no idea", "7", 0.0),
        ("9007199254740993", "9007199254740992", 0.0),
        ("7.", "She has 3 + 4 = 7.\n#### 7", 1.0),
        ("3/2", "2", 0.0),
        ("3/2", "1.5", 1.0),
        (r"\frac{3}{2}", "2", 0.0),
        (r"-\frac{3}{2}", "-1.5", 1.0),
        (r"1\frac{1}{2}", "1.5", 1.0),
        ("1 1/2", "1.5", 1.0),
        (r"\frac{-3}{2}", "-1.5", 1.0),
        (r"\frac{x}{3}", "3", 0.0),
        (r"\sqrt{2}/2", "2", 0.0),
        ("1{,}128", "1128", 1.0),
        ("2^{10}", "10", 0.0),
        ("3*4", "4", 0.0),
        (r"5 \times 3", "3", 0.0),
        ("1.5e3", "1500", 1.0),
        (r"\sqrt{2}", "2", 0.0),
        ("25 cm^2", "25", 1.0),
        (r"\boxed{50 \text{ cm}^2}", "50", 1.0),
        ("5 (cm)^2", "5", 1.0),
        ("(2+3)^2", "2", 0.0),
        ("(in total)\n\n**42**", "42", 1.0),
        ("the parts (a)\n* 5", "5", 1.0),
        ("110_2", "2", 0.0),
        ("1/0", "0", 0.0),
    ],
)
def test_number_compares_the_last_numbers(sample, text: str, answer: str, score: float) -> None:
    assert Number()([sample(text, answer=answer)]) == [score]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"right": 0.5}, "right=0.5: must be a finite number of 1 or more: evaluations count"),
        ({"wrong": 1.0}, "wrong=1.0: must be a finite number below 1: evaluations count"),
        ({"wrong": math.nan}, "wrong=nan: must be"),
    ],
)
def test_scores_that_evaluations_would_misread_are_refused(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.exact_match.{problem}"):
        ExactMatch(**fields)


@pytest.mark.parametrize("text", ["['" + "\\'" * 20_000, '["' + '\\"' * 20_000, "['" + "' '" * 20_000, "['\\"])
def test_a_quote_that_is_not_closed_takes_no_time(text: str) -> None:
    began = time.process_time()
    assert read_written(text) == text
    assert time.process_time() - began < 1
