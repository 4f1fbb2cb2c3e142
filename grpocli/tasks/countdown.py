"""task=countdown: reach a target with given numbers, each used once."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import TYPE_CHECKING

from grpocli.config.parts import Escaped, part, require
from grpocli.tasks.generated import Generated

if TYPE_CHECKING:
    from grpocli.tasks.task import Example


@part("task", "countdown")
class Countdown(Generated):
    """Puzzles such as: make 57 from 3, 7, 19, using each number once. `reward=[countdown]` checks the expression.

    Every puzzle has a solution; the column `answer` holds one.
    """

    target_template: Escaped | None = "<answer>{answer}</answer>"
    numbers: int = 4
    """Numbers of a puzzle, 2 to 8."""
    largest: int = 99
    """Largest number, at least 2."""
    largest_target: int = 999
    """Largest target, at least 10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "numbers", 2 <= self.numbers <= 8, "must be between 2 and 8")
        require(self, "largest", self.largest >= 2, "must be at least 2")
        require(self, "largest_target", self.largest_target >= 10, "must be at least 10")

    def make(self, random: random.Random) -> Example:
        while True:
            numbers = [random.randint(1, self.largest) for _ in range(self.numbers)]
            solution, target = _combined(numbers, random)
            if target.denominator == 1 and 1 <= target <= self.largest_target:
                break
        listed = ", ".join(map(str, numbers))
        question = (
            f"Using the numbers {listed}, each exactly once, and + - * / ( ), write an expression equal to {target}. "
            "End with the expression in <answer></answer>."
        )
        return {"question": question, "answer": solution, "numbers": numbers, "target": int(target)}


def _combined(numbers: list[int], random: random.Random) -> tuple[str, Fraction]:
    """Combine two numbers until one is left."""
    parts = [(str(number), Fraction(number)) for number in numbers]
    while len(parts) > 1:
        random.shuffle(parts)
        (left, a), (right, b), *rest = parts
        sign = random.choice("+-*/" if b and (a / b).denominator == 1 else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[sign]
        parts = [(f"({left} {sign} {right})", value), *rest]
    return parts[0]
