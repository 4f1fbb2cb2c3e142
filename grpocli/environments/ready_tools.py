"""The tools `calculator` and `python` of `task.tools`, run in worker processes."""

from __future__ import annotations

import random
from functools import lru_cache

from grpocli.environments.calculator import value_of

RUNNER = """
import ast
import random

random.seed({seed})

def execute(code):
    tree = ast.parse(code, "<program>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    space = {{"__name__": "__main__"}}
    exec(compile(tree, "<program>", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<program>", "eval"), space)
        if value is not None:
            print(repr(value))

execute({code!r})
"""
"""The program that runs the model's: as in a notebook, the value of a last expression is printed."""


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % and parentheses, such as 12*(3+4).
    """
    value = value_of(expression)
    if value.startswith("error: "):
        raise ValueError(value.removeprefix("error: "))
    return value


def python(code: str) -> str:
    """Run a Python program in a sandbox without network, and return what it prints.

    Args:
        code: The program. The value of its last line is printed, too. Each call starts anew.
    """
    from grpocli.sandbox.backends import backend_named
    from grpocli.sandbox.sandbox import Limits, Submission, run

    backend = backend_named(sandbox(), None)
    program = RUNNER.format(code=code, seed=random.getrandbits(32))  # the call's seed
    result = run(Submission(program, ["pass"]), Limits(), backend)
    if not all(result.passed):
        raise RuntimeError(f"{result.printed}{result.error}")
    return result.printed.rstrip("\n") or "the program printed nothing"


@lru_cache(maxsize=1)
def sandbox() -> str:
    """The name of a sandbox that holds on this machine. Raises SandboxError without one: nothing runs unprotected."""
    from grpocli.sandbox.backends import select_backend
    from grpocli.sandbox.sandbox import Limits

    return select_backend(None, Limits())
