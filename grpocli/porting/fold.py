"""Values of expressions: literals, constants assigned once, and simple arithmetic. Nothing is imported or run.

Anything else is `Unread`, with its text and line.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpocli.config.foreign_names import UNSTATED
from grpocli.porting.command_line import CommandLine, argument_names, is_parsing
from grpocli.porting.source import Unread
from grpocli.porting.syntax import Scope, Syntax

OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Folder(Syntax):
    """Computes values of expressions, without running anything."""

    def __init__(self, file: Path, tree: ast.Module, command_line: CommandLine | None = None) -> None:
        super().__init__(file, tree)
        self.command_line = command_line or CommandLine()
        self.argument_names = argument_names(tree)

    def fold(self, node: ast.expr, scope: Scope, line: int | None = None) -> Any:
        """The value of an expression, or Unread."""
        line = getattr(node, "lineno", 0) if line is None else line
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._fold_name(node, scope, line)
            case ast.List() | ast.Tuple() | ast.Set():
                return self._whole(node, [self.fold(one, scope, line) for one in node.elts])
            case ast.Dict():
                return self._fold_dict(node, scope, line)
            case ast.UnaryOp(op=ast.USub()):
                value = self.fold(node.operand, scope, line)
                return -value if isinstance(value, int | float) else self._unread(node)
            case ast.UnaryOp(op=ast.Not()) | ast.Compare() | ast.BoolOp() | ast.IfExp():
                return self._fold_choice(node, scope, line)
            case ast.BinOp():
                return self._fold_operation(node, scope, line)
            case ast.JoinedStr():
                return self._fold_text(node, scope, line)
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.Attribute(value=ast.Name() as holder):
                return self._fold_attribute(node, holder, scope, line)
            case ast.Call(func=ast.Name(id="dict")) if not node.args and all(one.arg for one in node.keywords):
                values = {str(one.arg): self.fold(one.value, scope, line) for one in node.keywords}
                return self._whole(node, values)
            case ast.Call(func=ast.Name(id="int" | "float" | "str" as kind), args=[only]):
                return self._convert(node, kind, self.fold(only, scope, line))
        return self._unread(node)

    def _whole(self, node: ast.expr, values: Any) -> Any:
        """A list or mapping, or Unread if one of its values is."""
        inner = values.values() if isinstance(values, dict) else values
        return self._unread(node) if any(isinstance(one, Unread) for one in inner) else values

    def _fold_name(self, node: ast.Name, scope: Scope, line: int) -> Any:
        found = scope.bound(node.id, line)
        if found is None:
            return self._unread(node)
        binding, owner = found
        if not binding.certain:
            return self._unread(node)
        value = self.fold(binding.value, owner, binding.line)
        if binding.index is None or isinstance(value, Unread):
            return value
        return value[binding.index] if isinstance(value, list) and binding.index < len(value) else self._unread(node)

    def _fold_attribute(self, node: ast.Attribute, holder: ast.Name, scope: Scope, line: int) -> Any:
        """An argument of the script's command line, or a setting of its GRPOConfig."""
        found = scope.bound(holder.id, line)
        if holder.id in self.argument_names and (found is None or is_parsing(found[0].value, self.argument_names)):
            value = self.command_line.value(node.attr)
            if isinstance(value, ast.expr):
                return self.fold(value, self.module, 10**9)
            return self._unread(node) if value is UNSTATED else value
        if found and isinstance(call := found[0].value, ast.Call) and self._callee(call, found[1]) == "GRPOConfig":
            value = self._arguments(call, found[1]).get(node.attr)
            return self._unread(node) if value is None else self.fold(value, found[1])
        return self._unread(node)

    def _fold_choice(self, node: ast.expr, scope: Scope, line: int) -> Any:
        """A comparison of two values, `not`, `and`, `or`, and `A if B else C`."""
        match node:
            case ast.IfExp():
                test = self.fold(node.test, scope, line)
                branch = node.body if test else node.orelse
                return self._unread(node) if isinstance(test, Unread) else self.fold(branch, scope, line)
            case ast.UnaryOp():
                value = self.fold(node.operand, scope, line)
                return self._unread(node) if isinstance(value, Unread) else not value
            case ast.BoolOp():
                last: Any = None
                for one in node.values:
                    last = self.fold(one, scope, line)
                    if isinstance(last, Unread):
                        return self._unread(node)
                    if bool(last) is isinstance(node.op, ast.Or):
                        break
                return last
            case ast.Compare(ops=[ast.Eq() | ast.Is() | ast.NotEq() | ast.IsNot() as operation], comparators=[right]):
                values = [self.fold(one, scope, line) for one in (node.left, right)]
                if any(isinstance(one, Unread) for one in values):
                    return self._unread(node)
                return (values[0] == values[1]) is isinstance(operation, ast.Eq | ast.Is)
        return self._unread(node)

    def _fold_dict(self, node: ast.Dict, scope: Scope, line: int) -> Any:
        values: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            folded = self.fold(value, scope, line)
            if key is None and isinstance(folded, dict):
                values |= folded
                continue
            name = self.fold(key, scope, line) if key is not None else self._unread(node)
            if not isinstance(name, str | int | float | bool):
                return self._unread(node)
            values[name] = folded
        return self._whole(node, values)

    def _fold_operation(self, node: ast.BinOp, scope: Scope, line: int) -> Any:
        left, right = self.fold(node.left, scope, line), self.fold(node.right, scope, line)
        operation = OPERATIONS.get(type(node.op))
        small = all(isinstance(one, int | float) and abs(one) < 1e15 for one in (left, right))
        power = isinstance(node.op, ast.Pow)
        fits = small and not (power and (abs(right) > 64 or abs(left) > 1e4))
        texts = isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str)
        if operation is None or not (fits or texts):
            return self._unread(node)
        try:
            return operation(left, right)
        except (ArithmeticError, ValueError):
            return self._unread(node)

    def _fold_text(self, node: ast.JoinedStr, scope: Scope, line: int) -> Any:
        pieces = []
        for part in node.values:
            value = part.value if isinstance(part, ast.Constant) else Unread("", 0)
            if isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None:
                value = self.fold(part.value, scope, line)
            if not isinstance(value, str | int | float):
                return self._unread(node)
            pieces.append(str(value))
        return "".join(pieces)

    def _convert(self, node: ast.Call, kind: str, value: Any) -> Any:
        try:
            return {"int": int, "float": float, "str": str}[kind](value) if not isinstance(value, Unread) else value
        except (TypeError, ValueError):
            return self._unread(node)

    def _arguments(self, call: ast.Call, scope: Scope, names: tuple[str, ...] = ()) -> dict[str, ast.expr]:
        """{name: expression} of a call; `**settings` of a known dictionary are its entries."""
        found = dict(zip(names, (one for one in call.args if not isinstance(one, ast.Starred)), strict=False))
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
                continue
            entries = self._entries(keyword.value, scope)
            found |= {f"**{ast.unparse(keyword.value)}": keyword.value} if entries is None else entries
        return found

    def _entries(self, node: ast.expr, scope: Scope) -> dict[str, ast.expr] | None:
        """{key: expression} of a dictionary: `{...}`, `dict(...)`, `a | b` and `**a` within; None for another one,
        and for one that depends on a condition."""
        if isinstance(node, ast.Name) and (bound := scope.bound(node.id, node.lineno)) and not bound[0].certain:
            return None
        node = self._definition(node, scope)
        pairs: list[tuple[str, ast.expr] | ast.expr] = []  # an expression is a dictionary within
        match node:
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is not None and not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                        return None
                    pairs.append((str(key.value), value) if isinstance(key, ast.Constant) else value)
            case ast.Call(func=ast.Name(id="dict")):
                pairs = [*node.args, *((one.arg, one.value) if one.arg else one.value for one in node.keywords)]
            case ast.BinOp(op=ast.BitOr()):
                pairs = [node.left, node.right]
            case _:
                return None
        found: dict[str, ast.expr] = {}
        for one in pairs:
            inner = {one[0]: one[1]} if isinstance(one, tuple) else self._entries(one, scope)
            if inner is None:
                return None
            found |= inner
        return found

    def _definition(self, node: ast.expr, scope: Scope) -> ast.expr:
        """The expression that a name was assigned last; the expression itself if it is not a name."""
        while isinstance(node, ast.Name) and (found := scope.bound(node.id, node.lineno)):
            binding, scope = found
            if binding.index is not None:
                break
            node = binding.value
        return node

    def _unread(self, node: ast.AST) -> Unread:
        text = " ".join(ast.unparse(node).split())
        return Unread(text if len(text) <= 80 else f"{text[:77]}...", getattr(node, "lineno", 0))
