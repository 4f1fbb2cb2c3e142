"""A calculator that the model calls by writing `<<12*34>>`, or `<<12*34=408>>` as GSM8K's worked solutions do."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from grpocli.environments.environment import Step
from grpocli.rewards.final_answer import final_answer
from grpocli.rewards.text_match import last_number
from grpocli.types import Message

CALL = re.compile(r"<<([^<>]*)>>")
LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**30
"""Nothing beyond it is computed."""
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator:
    """A turn with a call is answered with the last call's value; a turn without one is the final answer.

    right: the reward where the last number of the final answer is that of the example's column `answer`; wrong: where
    it is not. cost: taken off for each call. role: of the calculator's messages; a template that knows `tool` may
    want that.
    """

    def __init__(self, right: float = 1.0, wrong: float = 0.0, cost: float = 0.0, role: str = "user") -> None:
        self.right, self.wrong, self.cost, self.role = right, wrong, cost, role

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Raises ValueError where the example has no number to reach."""
        answer = str(metadata.get("answer", ""))
        if last_number(answer) is None:
            raise ValueError(f"the calculator needs an example with a number in `answer`, not {answer!r}")
        return {"answer": answer}

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        text = messages[-1]["content"]
        calls = CALL.findall(text)
        if calls:
            return Step(
                [{"role": self.role, "content": value_of(calls[-1].partition("=")[0])}], -self.cost, False, metadata
            )
        correct = last_number(final_answer(text)) == last_number(metadata["answer"])
        return Step([], self.right if correct else self.wrong, True, metadata)


def value_of(expression: str) -> str:
    """The value of a sum, product and the like of numbers, in digits; "error: ..." where there is none."""
    if len(expression) > LONGEST:
        return "error: too long"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "error: no arithmetic"
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(operand)))
    raise ValueError(ast.dump(node))


def _bounded(value: int | float) -> int | float:
    if not abs(value) <= LARGEST:
        raise OverflowError(value)
    return value
