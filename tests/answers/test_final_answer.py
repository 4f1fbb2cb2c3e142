"""Finding the final answer: one rule for all rewards that check answers."""

from __future__ import annotations

from contextlib import closing

import pytest

from grpocli.answers.final_answer import answer_expression, final_answer
from grpocli.rewards.rule_based import ExactMatch, Math, Number

MARKS = [
    ("<think>a 7</think><answer>5</answer>", "5"),
    ("<think>\\boxed{7}</think> 5", "5"),
    ("\\boxed{7} <think> and more", "7"),
    ("7</think> so 5", "so 5"),
    ("<think>7 #### 7", ""),
    ("\\boxed{7}, no: \\boxed{5}", "5"),
    ("\\boxed{5} <answer>7</answer>", "5"),
    ("<answer>7</answer> <answer> 5 </answer>", "5"),
    ("<answer>5", "5"),
    ("7 #### 7\n#### 5", "5"),
    ("<answer>5</answer> #### 7", "5"),
    ("42 \\boxed{}", ""),
    ("\\boxed{\\frac{1}{2}} {", "\\frac{1}{2}"),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("\\boxed{1} and \\boxed{2}", "1, 2"),
    ("\\boxed{5} is it, \\boxed{5}", "5"),
    ("\\boxed{1}" + " " * 70 + "is wrong, so \\boxed{2}", "2"),
    ("\\boxed{5", "\\boxed{5"),
    ("\\boxed{5} \\boxed{}", ""),
    ("\\boxed{5}, no: \\boxed{6", ""),
    (" plain text ", "plain text"),
]


@pytest.mark.parametrize(("text", "answer"), MARKS)
def test_the_last_box_then_the_answer_tag_then_the_hashes_then_the_text(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("The total is 3/4.", "3/4"),
        ("so 3 + 4 = 7", "3 + 4 = 7"),
        ("It costs $5 and then $6.", "$6"),
        ("I think it is $x+1$.", "$x+1$"),
        ("The roots are $1$ and $2$.", "$1$, $2$"),
        ("so there are 9 apples (red)", "9"),
        ("The point is (3, 4).", "(3, 4)"),
        ("**Answer:** 42", "42"),
        ("2x+1", "2x+1"),
        ("5 million people, that is 5 million", "5 million"),
        ("The roots are 1,2,3, 4 and 5.", "1,2,3, 4 and 5"),
        ("The roots are 1,000 apples, b = 2, and 3", "1,000 apples, b = 2, and 3"),
        (f"The roots are {'1,' * 60}1x, 5", "5"),  # not a list, and known within linear time
        ("no idea at all", ""),
    ],
)
def test_without_a_mark_the_last_expression_is_the_answer(text: str, expression: str) -> None:
    assert answer_expression(text) == expression


@pytest.mark.processes
def test_every_reward_finds_the_same_answer(sample) -> None:
    text = "<think>It is 7, or \\boxed{7}.</think>\n<answer>5</answer>"
    with closing(Math(workers=1, timeout=20)) as math:
        for reward in (math, Number(), ExactMatch()):
            assert reward([sample(text, answer="5"), sample(text, answer="7")]) == [1.0, 0.0]
            assert reward.votes([sample(text), sample("5")])[0] == reward.votes([sample("5")])[0]
