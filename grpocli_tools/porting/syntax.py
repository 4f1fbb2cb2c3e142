"""The scopes of a script: assignments, functions, imports and calls. Nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from grpocli.errors import ConfigError
from grpocli_tools.porting.source import read_mapping, read_text

TOO_DEEP = "an expression is nested too deep, or has too many terms, to be read"
Function = ast.FunctionDef | ast.AsyncFunctionDef
IPYTHON = re.compile(r"^([ \t]*)[!%](?:.*\\\n)*.*$", re.MULTILINE)
FOREIGN_CELLS = ("%%bash", "%%sh", "%%writefile", "%%html", "%%javascript", "%%script")
"""Beginnings of a notebook's cells that are not Python."""


@dataclass(frozen=True, slots=True)
class Binding:
    """An assignment to a name. index: its place in an unpacked tuple; None if the value is its own.

    certain: whether it is the value under every condition. scope: where the value is read; None for that of the name.
    """

    value: ast.expr
    line: int
    index: int | None = None
    certain: bool = True
    scope: Scope | None = None


@dataclass(slots=True)
class Scope:
    """A module or function: the assignments to each name, its functions, and the scope around it."""

    outer: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """{name: (module, name there)}."""

    def bound(self, name: str, line: int) -> tuple[Binding, Scope] | None:
        """The last assignment before a line, and the scope of its value. Outer scopes count as a whole."""
        own = [one for one in self.bindings.get(name, ()) if one.line < line]
        if own:
            return own[-1], own[-1].scope or self
        return self.outer.bound(name, 10**9) if self.outer else None

    def function(self, name: str) -> tuple[Function, Scope] | None:
        if name in self.functions:
            return self.functions[name], self
        return self.outer.function(name) if self.outer else None

    def imported(self, name: str) -> tuple[str, str] | None:
        return self.imports.get(name) or (self.outer.imported(name) if self.outer else None)


def script_text(file: Path) -> str:
    """The text of a script, or of the code cells of a notebook; lines for IPython (`!pip`, `%cd`) are `pass`."""
    text = read_text(file)
    if file.suffix == ".ipynb":
        cells = [one for one in read_mapping(file).get("cells", ()) if one.get("cell_type") == "code"]
        sources = ["".join(one.get("source", ())) for one in cells]
        text = "\n".join(one for one in sources if not one.lstrip().startswith(FOREIGN_CELLS))
    with suppress(SyntaxError, RecursionError, MemoryError):
        ast.parse(text)
        return text
    return IPYTHON.sub(lambda found: f"{found[1]}pass" + "\n" * found[0].count("\n"), text)


def parsed(file: Path) -> ast.Module:
    """The syntax of a script or notebook. Raises ConfigError, with the line of a syntax error."""
    text = script_text(file)
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno}: {error.msg}", key=str(file)) from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(TOO_DEEP, key=str(file)) from error


class Syntax:
    """The names and calls of one script."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.source_file, self.tree = file, tree
        self.module = Scope()
        self.scopes: dict[Function, Scope] = {}
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.changes: list[tuple[ast.Attribute, ast.expr, Scope]] = []
        self.conditions: list[str] = []
        self._visit(tree.body, self.module, certain=True)

    def _visit(self, body: list[ast.stmt], scope: Scope, certain: bool) -> None:
        for statement in body:
            self._statement(statement, scope, certain)

    def _statement(self, statement: ast.stmt, scope: Scope, certain: bool) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.functions[statement.name] = statement
                inner = self.scopes[statement] = Scope(scope)
                self._parameters(statement, inner)
                self._visit(statement.body, inner, certain=True)
            case ast.ClassDef():
                self._visit(statement.body, Scope(scope), certain=True)
            case ast.ImportFrom() | ast.Import():
                self._import(statement, scope)
            case ast.Assign():
                self._expression(statement.value, scope)
                for target in statement.targets:
                    self._bind(target, statement.value, scope, certain)
            case ast.AnnAssign() if statement.value is not None:
                self._expression(statement.value, scope)
                self._bind(statement.target, statement.value, scope, certain)
            case ast.AugAssign():
                value = ast.copy_location(ast.BinOp(statement.target, statement.op, statement.value), statement)
                self._bind(statement.target, value, scope, certain=False)
            case _:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.expr):
                        self._expression(child, scope)
                main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
                sure = certain and (main or isinstance(statement, ast.With | ast.Try))
                for inner_body in _bodies(statement):
                    self._visit(inner_body, scope, sure)

    def _parameters(self, function: Function, scope: Scope) -> None:
        """Defaults of parameters count as assignments."""
        named = [*function.args.posonlyargs, *function.args.args]
        given = list(zip(named[len(named) - len(function.args.defaults) :], function.args.defaults, strict=True))
        more = [(a, d) for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d]
        for parameter, value in [*given, *more]:
            scope.bindings.setdefault(parameter.arg, []).append(Binding(value, 0))

    def _import(self, statement: ast.ImportFrom | ast.Import, scope: Scope) -> None:
        for alias in statement.names:
            name = alias.asname or alias.name
            module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else ""
            scope.imports[name] = (module, alias.name)

    def _expression(self, node: ast.expr, scope: Scope) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                self.calls.append((inner, scope))

    def _bind(self, target: ast.expr, value: ast.expr, scope: Scope, certain: bool) -> None:
        line = getattr(value, "end_lineno", None) or target.lineno  # a call over lines may read the old value
        if isinstance(target, ast.Name):
            scope.bindings.setdefault(target.id, []).append(Binding(value, line, None, certain))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._bind(one, part, scope, certain)
        elif isinstance(target, ast.Tuple | ast.List):
            for index, one in enumerate(target.elts):
                if isinstance(one, ast.Name):
                    scope.bindings.setdefault(one.id, []).append(Binding(value, line, index, certain))
        elif isinstance(target, ast.Attribute):
            self.changes.append((target, value, scope))
        elif isinstance(target, ast.Subscript) and isinstance(name := target.value, ast.Name):
            found = scope.bound(name.id, name.lineno)
            if found and is_dictionary(found[0].value):  # from here on the dictionary is not read
                scope.bindings.setdefault(name.id, []).append(Binding(found[0].value, line, certain=False))

    def _calls_of(self, name: str) -> list[tuple[ast.Call, Scope]]:
        return [(call, scope) for call, scope in self.calls if self._callee(call, scope) == name]

    def _callee(self, call: ast.Call, scope: Scope) -> str:
        """The last name of a called function, as it is called where it is imported from."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr
        if isinstance(call.func, ast.Name):
            imported = scope.imported(call.func.id)
            return imported[1] if imported else call.func.id
        return ""

    def _made(self, node: ast.expr, scope: Scope) -> tuple[ast.expr, Scope]:
        """The expression behind a name, also of the first name of an unpacked tuple, and its scope."""
        for _ in range(20):
            if not isinstance(node, ast.Name) or not (found := scope.bound(node.id, node.lineno)):
                break
            binding, scope = found
            self._note_condition(node.id, binding)
            node = binding.value
        return node, scope

    def _note_condition(self, name: str, binding: Binding) -> None:
        """Note that a value depends on a condition; the value of its last assignment is taken."""
        note = f"{name} depends on a condition; this takes what line {binding.line} sets"
        if not binding.certain and note not in self.conditions:
            self.conditions.append(note)


def is_dictionary(node: ast.expr) -> bool:
    """Whether an expression is `{...}` or `dict(...)`."""
    return isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "dict")


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if isinstance(inner := getattr(statement, name, None), list):
            yield inner
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
