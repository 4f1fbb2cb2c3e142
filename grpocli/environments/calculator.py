"""A calculator for the model, called by writing `<<12*34>>`, or `<<12*34=408>>` as in GSM8K's solutions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from grpocli.environments.environment import Step
from grpocli.rewards.rule_based import last_number
from grpocli.types import Message

CALL = re.compile(r"<<([^<>]*)>>")
LONGEST = 200
"""Most characters of an expression."""
LARGEST = 10**30
"""Largest absolute value of a result."""
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
    """Answers a turn that has calls with the value of the last one; a turn without a call is the final answer.

    right: reward if the last number of the final answer equals the one in the example's column `answer`. wrong: reward
    if it does not. cost: subtracted for each turn with a call. role: of the calculator's messages; `tool` for chat
    templates that support it.
    """

    def __init__(self, right: float = 1.0, wrong: float = 0.0, cost: float = 0.0, role: str = "user") -> None:
        self.right, self.wrong, self.cost, self.role = right, wrong, cost, role

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The state of a new episode. Raises ValueError if the example has no number in `answer`."""
        answer = str(metadata.get("answer", ""))
        if last_number(answer) is None:
            raise ValueError(f"the calculator needs an example with a number in `answer`, not {answer!r}")
        return {"answer": answer}

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        from grpocli.answers.final_answer import final_answer  # slow: its patterns are compiled

        text = messages[-1]["content"]
        calls = CALL.findall(text)
        if calls:
            return Step(
                [{"role": self.role, "content": value_of(calls[-1].partition("=")[0])}], -self.cost, False, metadata
            )
        correct = last_number(final_answer(text)) == last_number(metadata["answer"])
        return Step([], self.right if correct else self.wrong, True, metadata)


def value_of(expression: str) -> str:
    """The value of an arithmetic expression, in digits; "error: ..." if it has none."""
    if len(expression) > LONGEST:
        return "error: too long"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error: no arithmetic"
    if not abs(value) <= LARGEST:
        return "error: no arithmetic"
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
    raise ValueError(ast.dump(node))
