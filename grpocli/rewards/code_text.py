"""Reads texts of programming problems: the program in a completion, and tests in the forms of data sets."""

from __future__ import annotations

import ast
import json
import re
import symtable
import textwrap
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from grpocli.rewards.reward import read_written

BLOCK = re.compile(
    r"^(?P<indent>[ \t>]*+(?:(?:[-*+]|\d+[.)])[ \t]+)?+)"
    r"(?:(?:[^\n`~]|(?<!`)`{1,2}(?!`))*[^\n`~\w](?=`+(?:[Pp]y(?:thon)?3?)?[ \t\r]*\n))?"  # words before the fence
    r"(?P<fence>`{3,}|~{3,})[^\w\n`~]*(?P<language>\w*)[^\n`]*\n"
    r"(?P<code>.*?)(?:(?:^[ \t>]*|(?<=[^\s`])(?=`+[ \t\r]*$))(?P=fence)[`~]*(?P<closed>(?![\w`~]))|\Z)",
    re.MULTILINE | re.DOTALL,
)
PYTHON = ("python", "python3", "py", "py3")
READS = re.compile(r"\binput\(|\bstdin\b|\bopen\(0")
"""What a script does that has an input."""
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
DEFINED = re.compile(r"^(?:(?:async +)?def +|class +|(?=\w+ *=))(\w+)", re.MULTILINE)

OF_PROGRAM = ("solution", "solutions", "main", "__main__", "your_module")
"""Modules from which published tests import the program."""
INPUTS = ("inputs", "input", "stdin", "args")
OUTPUTS = ("outputs", "output", "stdout", "expected_output", "expected_stdout", "expected")
NESTED = ("test_cases", "tests", "test_list", "test", "assert_case", "functional")
"""Keys of an object that holds the tests."""
CONDITIONS = ("all", "any", "isinstance", "math.isclose", "np.allclose")
"""Functions whose result a test means to hold."""
SCRIPT, CALLED = ("stdin", "stdin_stdout"), ("functional", "function_call")
"""Types of tests."""
CALL = """\
def _plain(value):
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value

_called = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
_found, _wanted = _plain(_called({arguments})), {wanted!r}
assert _found == _wanted or [_found] == _wanted, f"{{_found!r}}, expected {{_wanted!r}}"
"""
"""A test of a function; data sets write the value that it returns with or without a list around it."""
CASE = """\
import unittest
_ran = unittest.defaultTestLoader.loadTestsFromTestCase({case}).run(unittest.TestResult())
assert _ran.wasSuccessful(), (_ran.failures + _ran.errors)[0][1].strip().split("\\n")[-1]
"""


def program(text: str, names: set[str], before: str) -> str:
    """The code before the program and the program in a completion.

    It is the last block of Python that defines one of the names, else the last of Python, of no language, of any.
    Without names it is a script, and the last that reads its input is taken. Without a block, it is the first lines
    that are Python.
    """

    def fitness(block: tuple[str, str]) -> int:
        language, code = block
        fits = names.intersection(DEFINED.findall(code)) if names else READS.search(code)
        if fits and language in ("", *PYTHON):
            return 3
        return 2 if language in PYTHON else 1 if not language else 0

    if found := blocks(text):
        return f"{before}\n{max(reversed(found), key=fitness)[1]}"
    return before + _python_lines(text, before)


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the code of each fenced block that has code, without the fence's indent.

    A block that is not closed counts if it is the only one.
    """
    found = [one for one in BLOCK.finditer(text) if one["code"].strip()]
    if len(found) > 1 and found[-1]["closed"] is None:
        found.pop()
    return [(one["language"].lower(), _dedent(one["code"], len(one["indent"]))) for one in found]


def _dedent(code: str, most: int) -> str:
    """The code without its indent, of which a part of a function or of a quote loses only that of the fence."""
    with suppress(*NOT_PYTHON):
        dedented = textwrap.dedent(code)
        compile(dedented, "<program>", "exec", dont_inherit=True)
        return dedented
    widths = [len(line) - len(line.lstrip(" \t>")) for line in code.splitlines() if line.strip(" \t\r>")]
    return re.sub(rf"(?m)^[ \t>]{{,{min([most, *widths])}}}", "", code)


def _python_lines(text: str, before: str) -> str:
    """The first lines that are Python after the code before them; all of the text if none are."""
    lines, first = text.split("\n"), before.count("\n") + 1
    while lines:
        code = "\n".join(lines)
        try:
            compile(before + code, "<program>", "exec", dont_inherit=True)
        except SyntaxError as error:
            lines = lines[: max(0, min(len(lines) - 1, (error.lineno or 0) - first))]
        except NOT_PYTHON:
            break
        else:
            return code if code.strip() else text
    return text


def symbols(code: str) -> tuple[set[str], set[str]]:
    """The names that a module of this code defines, and the global names that it uses. Empty if it is not Python."""
    with suppress(*NOT_PYTHON):
        tables = [symtable.symtable(code, "<program>", "exec")]
        for table in tables:
            tables += table.get_children()
        defined = {one.get_name() for one in tables[0].get_symbols() if one.is_assigned() or one.is_imported()}
        used = {one for table in tables for one in table.get_symbols() if one.is_global() and one.is_referenced()}
        return defined, {one.get_name() for one in used}
    return set(), set()


@dataclass(slots=True)
class ProblemTests:
    """The tests of a problem.

    cases: each is code, or a program's standard input and the output that it has to print. imports: of the tests, as
    code. names: the global ones that tests use. defined: their own.
    """

    entry_point: str = ""
    cases: list[str | tuple[str, str]] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)

    def add(self, value: Any) -> None:
        """Add code, an object with inputs and outputs, or a list of these, also as JSON text. Raises ValueError."""
        value = read_written(value)
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
        """Add tests of a program's output or, if they name one or get values, of a function."""
        kind = test.get("testtype", test.get("type"))
        name = str(test.get("fn_name") or function_name(test.get("metadata")) or self.entry_point).split(".")[-1]
        if nested := next((key for key in NESTED if key in test), None):
            self.entry_point = name
            self.add(test[nested])
            return
        key, other_key = (next((one for one in keys if one in test), "") for keys in (INPUTS, OUTPUTS))
        given: Any = test.get(key)
        wanted: Any = test.get(other_key)
        if given is None or not other_key:
            raise ValueError(f"a test with {', '.join(test)} has no input and output")
        many = key == "inputs" and isinstance(given, list)
        values = isinstance(given, dict) or (isinstance(given, list) and not isinstance(wanted, list) and not many)
        is_call = kind in CALLED or (kind not in SCRIPT and bool(name or values))
        if is_call and not name:
            raise ValueError("a test of a function names none; give the example the column entry_point")
        if not many and (is_call or not isinstance(given, list)):
            given, wanted = [given], [wanted]
        if not isinstance(wanted, list) or len(given) != len(wanted):
            raise ValueError(f"tests with {len(given)} inputs have other outputs than one for each: {str(wanted)[:60]}")
        for one, other in zip(given, wanted, strict=True):
            if is_call:
                self.cases.append(CALL.format(name=name, arguments=_arguments(one), wanted=_json(other)))
                self.names |= {name, "Solution"}
            elif one is None or other is None:
                raise ValueError("a test of a script has null as its input or output")
            else:
                texts = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (one, other))
                self.cases.append((next(texts), next(texts)))

    def _add_code(self, code: str) -> None:
        """Add code, also in fences, with a call of each test function and class that it only defines."""
        if "pytest." not in code:
            code = code.replace("import pytest\n", "\n")
        try:
            tree = ast.parse(code)
            of_program = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module in OF_PROGRAM]
            text = ast.unparse(ast.fix_missing_locations(_Checks().visit(tree)))
        except SyntaxError as error:
            if not (fenced := "\n".join(one for _, one in blocks(code))):
                raise ValueError(f"its tests are not Python ({error.msg}): {code.strip()[:60]!r}") from error
            self.add(fenced)
            return
        defined, used = symbols(text)
        self.names |= used
        self.defined |= defined - {name.name for one in of_program for name in one.names}
        calls = [call for one in tree.body for call in self._calls_of(one, used)]
        self.cases += [f"{text}\n{call}" for call in calls or [""]]
        imports = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
        self.imports += [ast.unparse(one) for one in imports if getattr(one, "module", "") != "__future__"]

    def _calls_of(self, one: ast.stmt, used: set[str]) -> list[str]:
        if isinstance(one, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in one.bases):
            return [CASE.format(case=one.name)]
        if isinstance(one, ast.ClassDef) and one.name.startswith("Test") and one.name not in used:
            methods = [method for method in one.body if isinstance(method, ast.FunctionDef)]
            if any(len(method.args.args) > 1 or method.name.startswith(("setup_", "teardown_")) for method in methods):
                raise ValueError(f"{one.name} is a class of pytest with arguments or a setup, which are not run")
            return [f"{one.name}().{method.name}()" for method in methods if method.name.startswith("test")]
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
        called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        if called in ("unittest.main", "pytest.main"):
            return ast.Pass()
        is_condition = isinstance(node.value, ast.Compare | ast.BoolOp | ast.UnaryOp) or called in CONDITIONS
        return ast.Assert(node.value) if is_condition else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        names = [f"{one.asname} = {one.name}" for one in node.names if one.asname]
        return ast.parse("\n".join(names) or "pass").body if node.module in OF_PROGRAM else node


@lru_cache(maxsize=64)
def problem_tests(given: str) -> ProblemTests:
    """The tests of a problem, from JSON of the tests and the entry point. Raises ValueError for tests that are none."""
    value, entry_point = json.loads(given)
    if not value:
        raise ValueError("the example has no tests")
    found = ProblemTests(entry_point)
    found.add(value)
    found.names -= found.defined
    return found


def function_name(metadata: Any) -> str:
    """The function that the field `metadata` of a row or of a test names."""
    found = read_written(metadata)
    return str(found.get("func_name") or "") if isinstance(found, dict) else ""


def _arguments(given: Any) -> str:
    """The arguments of a call as code, from a list, an object, or a text: a value a line, `1, 2`, or `a = 1, b = 2`."""
    if isinstance(given, dict):
        return f"**{given!r}"
    if isinstance(given, str):
        text = given.strip()
        given = [_json(line) for line in text.splitlines()]
        with suppress(*NOT_PYTHON):
            call = ast.parse(f"_({text})", mode="eval").body
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and (call.keywords or given == [text]):
                named = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
                return f"*{[ast.literal_eval(one) for one in call.args]!r}, **{named!r}"
    return f"*{given if isinstance(given, list) else [given]!r}"


def _json(value: Any) -> Any:
    with suppress(ValueError, TypeError):
        return json.loads(value)
    return value
