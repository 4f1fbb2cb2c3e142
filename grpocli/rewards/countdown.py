"""reward=[countdown]: whether an expression of the given numbers has the target value."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from fractions import Fraction

from grpocli.answers.final_answer import after_thinking
from grpocli.config.parts import part
from grpocli.rewards.reward import Correctness, Failure, Sample, Score

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LONGEST = 500
"""Characters of an expression that are parsed."""


@part("reward", "countdown", package="reward.countdown")
class CountdownReward(Correctness):
    """`right` (1) if the last <answer> uses each number once and equals the target, else `wrong` (0).

    The example has the columns `numbers` and `target`. Without an <answer> the last line counts.
    """

    solution_column = "answer"
    answer_column: str = "target"
    """Column of the example with the target."""

    def score_sample(self, sample: Sample) -> Score:
        numbers, target = sample.columns.get("numbers"), sample.columns.get(self.answer_column)
        if not isinstance(numbers, list) or target is None:
            return Failure(f"the example needs `numbers` and {self.answer_column!r}")
        text = after_thinking(sample.text)
        found = ANSWER.findall(text) or text.strip().splitlines()[-1:]
        return self.value(bool(found) and reaches(found[-1], numbers, target))


def reaches(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the text is an expression of + - * / and exactly these numbers with that value; "= VALUE" may follow."""
    try:
        tree = ast.parse(expression.partition("=")[0].strip()[:LONGEST], mode="eval").body
        used: list[int] = []
        return _value(tree, used) == target and sorted(used) == sorted(numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.AST, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left, used) + _value(right, used)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left, used) - _value(right, used)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left, used) * _value(right, used)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left, used) / _value(right, used)
    raise ValueError(ast.dump(node))
