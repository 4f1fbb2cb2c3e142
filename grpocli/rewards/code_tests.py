"""Reads the tests of a programming problem in the forms in which data sets publish them."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from grpocli.rewards.written import parsed

OF_PROGRAM = ("solution", "main", "__main__")
"""Modules from which published tests import the program."""
CALL = """\
def _plain(value):
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value

_called = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
_found, _wanted = _plain(_called(*{arguments!r})), {wanted!r}
assert _found == _wanted or [_found] == _wanted, f"{{_found!r}}, expected {{_wanted!r}}"
"""
"""A test of a function; data sets write the value that it returns with or without a list around it."""
CASE = """\
import unittest
_ran = unittest.defaultTestLoader.loadTestsFromTestCase({case}).run(unittest.TestResult())
assert _ran.wasSuccessful(), (_ran.failures + _ran.errors)[0][1].strip().split("\\n")[-1]
"""


@dataclass(slots=True)
class ProblemTests:
    """The tests of a problem.

    cases: each is code, or a program's standard input and the output that it has to print. imports: of the tests, as
    code. names: those that tests use, the program's among them.
    """

    entry_point: str = ""
    cases: list[str | tuple[str, str]] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, value: Any) -> None:
        """Add code, an object with inputs and outputs, or a list of these, also as JSON text. Raises ValueError."""
        value = parsed(value)
        if isinstance(value, str):
            self._add_code(value)
        elif isinstance(value, dict):
            self._add_contest(value)
        elif isinstance(value, list):
            for one in value:
                self.add(one)
        else:
            raise ValueError(f"a test is a text or an object with input and output, not {value!r}")

    def _add_contest(self, test: dict[str, Any]) -> None:
        """Add tests of a program's output or, with `fn_name` or `testtype: functional`, of a function."""
        given, wanted = (test.get(f"{one}s", test.get(one)) for one in ("input", "output"))
        if given is None or wanted is None:
            raise ValueError(f"a test with {', '.join(test)} has no input and output")
        is_call = test.get("fn_name") or test.get("testtype", test.get("type")) in ("functional", "function_call")
        name = test.get("fn_name") or function_name(test.get("metadata")) or self.entry_point
        if is_call and not name:
            raise ValueError("a test of a function names none; give the example the column entry_point")
        if "inputs" not in test and (is_call or not isinstance(given, list)):
            given, wanted = [given], [wanted]
        for one, other in zip(given, wanted, strict=True):
            if is_call:
                arguments = [_json(line) for line in one.strip().split("\n")] if isinstance(one, str) else one
                self.cases.append(CALL.format(name=name, arguments=arguments, wanted=_json(other)))
                self.names |= {name, "Solution"}
            else:
                texts = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (one, other))
                self.cases.append((next(texts), next(texts)))

    def _add_code(self, code: str) -> None:
        """Add code, with a call of each test function and class that it only defines."""
        try:
            tree = ast.fix_missing_locations(_Checks().visit(ast.parse(code)))
        except SyntaxError:  # the sandbox reports it
            self.cases.append(code)
            return
        used = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
        calls = [call for one in tree.body for call in self._calls_of(one, used)]
        self.cases += [f"{ast.unparse(tree)}\n{call}" for call in calls or [""]]
        imports = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
        self.imports += [ast.unparse(one) for one in imports if getattr(one, "module", "") != "__future__"]
        self.names |= used

    def _calls_of(self, one: ast.stmt, used: set[str]) -> list[str]:
        if isinstance(one, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in one.bases):
            return [CASE.format(case=one.name)]
        if isinstance(one, ast.ClassDef) and one.name.startswith("Test") and one.name not in used:
            raise ValueError(f"{one.name} is a class of pytest; its tests have to be functions, or a unittest.TestCase")
        if not isinstance(one, ast.FunctionDef) or one.name in used:
            return []
        needed = [argument.arg for argument in one.args.args][: len(one.args.args) - len(one.args.defaults)]
        if one.name == "check" or needed == ["candidate"]:
            if not self.entry_point:
                raise ValueError(f"{one.name} needs the column entry_point, the name of the function that it tests")
            return [f"{one.name}({self.entry_point})"]
        if one.name.startswith("test") and needed:
            raise ValueError(f"{one.name} takes arguments, which only pytest gives it")
        return [f"{one.name}()"] if one.name.startswith("test") else []


class _Checks(ast.NodeTransformer):
    """Makes statements test something without a runner.

    A comparison that stands alone is asserted, a runner is not called, and what is imported from the program is
    already there.
    """

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ("unittest.main", "pytest.main"):
            return ast.Pass()
        return ast.Assert(node.value) if isinstance(node.value, ast.Compare | ast.BoolOp | ast.UnaryOp) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return ast.Pass() if node.module in OF_PROGRAM else node


@lru_cache(maxsize=64)
def problem_tests(given: str) -> ProblemTests:
    """The tests of a problem, from JSON of the tests and the entry point. Raises ValueError for tests that are none."""
    value, entry_point = json.loads(given)
    found = ProblemTests(entry_point)
    found.add(value)
    return found


def function_name(metadata: Any) -> str:
    """The function that the field `metadata` of a row or of a test names."""
    found = parsed(metadata)
    return str(found.get("func_name") or "") if isinstance(found, dict) else ""


def _json(value: Any) -> Any:
    with suppress(ValueError, TypeError):
        return json.loads(value)
    return value
