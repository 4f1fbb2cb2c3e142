"""Values of expressions: literals, constants, sums of numbers and arguments of the command line. Nothing is run.

Anything else is `Unread`, with its text and line.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpocli_tools.porting.command_line import CommandLine, is_parsing
from grpocli_tools.porting.foreign_names import UNSTATED
from grpocli_tools.porting.source import Unread
from grpocli_tools.porting.syntax import Scope, Syntax

OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Folder(Syntax):
    """Computes values of expressions, without running anything."""

    def __init__(self, file: Path, tree: ast.Module, command_line: CommandLine) -> None:
        super().__init__(file, tree)
        self.command_line = command_line

    def fold(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression, or Unread."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._fold_name(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                return self._whole(node, [self.fold(one, scope) for one in node.elts])
            case ast.Dict() | ast.Call(func=ast.Name(id="dict")):
                entries = _entries(node)
                values = {name: self.fold(one, scope) for name, one in (entries or {}).items()}
                return self._unread(node) if entries is None else self._whole(node, values)
            case ast.UnaryOp(op=ast.USub()):
                value = self.fold(node.operand, scope)
                return -value if isinstance(value, int | float) else self._unread(node)
            case ast.BinOp() if operation := OPERATIONS.get(type(node.op)):
                pair = [self.fold(one, scope) for one in (node.left, node.right)]
                try:
                    return operation(*pair) if all(isinstance(one, int | float) for one in pair) else self._unread(node)
                except ArithmeticError:
                    return self._unread(node)
            case ast.BoolOp(op=ast.Or(), values=[first, second]):  # script_args.dataset_config or "main"
                return self.fold(first, scope) or self.fold(second, scope)
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.Attribute(value=ast.Name() as holder):
                return self._fold_argument(node, holder, scope)
        return self._unread(node)

    def _whole(self, node: ast.expr, values: Any) -> Any:
        """A list or mapping, or Unread if one of its values is."""
        inner = values.values() if isinstance(values, dict) else values
        return self._unread(node) if any(isinstance(one, Unread) for one in inner) else values

    def _fold_name(self, node: ast.Name, scope: Scope) -> Any:
        found = scope.bound(node.id, node.lineno)
        if found is None or not found[0].certain:
            return self._unread(node)
        binding, owner = found
        value = self.fold(binding.value, owner)
        if binding.index is None or isinstance(value, Unread):
            return value
        return value[binding.index] if isinstance(value, list) and binding.index < len(value) else self._unread(node)

    def _fold_argument(self, node: ast.Attribute, holder: ast.Name, scope: Scope) -> Any:
        """An argument of the script's command line, or of the call that makes an object."""
        found = scope.bound(holder.id, holder.lineno)
        if found and isinstance(made := found[0].value, ast.Call) and not is_parsing(made):
            given = (self.fold(one.value, found[1]) for one in made.keywords if one.arg == node.attr)
            return next(given, self._unread(node))
        value = self.command_line.value(node.attr) if found and is_parsing(found[0].value) else UNSTATED
        value = self.fold(value, self.module) if isinstance(value, ast.expr) else value
        return self._unread(node) if value is UNSTATED or isinstance(value, Unread) else value

    def _arguments(self, call: ast.Call, scope: Scope, names: tuple[str, ...] = ()) -> dict[str, ast.expr]:
        """{name: expression} of a call; `**settings` of a known dictionary are its entries."""
        found = dict(zip(names, (one for one in call.args if not isinstance(one, ast.Starred)), strict=False))
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
                continue
            bound = scope.bound(keyword.value.id, keyword.value.lineno) if isinstance(keyword.value, ast.Name) else None
            entries = _entries(bound[0].value if bound and bound[0].certain else keyword.value)
            found |= {f"**{ast.unparse(keyword.value)}": keyword.value} if entries is None else entries
        return found

    def _unread(self, node: ast.AST) -> Unread:
        text = " ".join(ast.unparse(node).split())
        return Unread(text if len(text) <= 80 else f"{text[:77]}...", getattr(node, "lineno", 0))


def _entries(node: ast.expr) -> dict[str, ast.expr] | None:
    """{key: expression} of `{"key": ...}` or `dict(key=...)`; None for another expression."""
    match node:
        case ast.Dict():
            keys = [one.value if isinstance(one, ast.Constant) else None for one in node.keys]
            found = {one: value for one, value in zip(keys, node.values, strict=True) if isinstance(one, str)}
            return found if len(found) == len(keys) else None
        case ast.Call(func=ast.Name(id="dict"), args=[]) if all(one.arg for one in node.keywords):
            return {str(one.arg): one.value for one in node.keywords}
    return None
