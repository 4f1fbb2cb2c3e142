"""The program's process: executes the program and answers requests of the tests' process."""

from __future__ import annotations

import itertools
import sys

from .protocol import Closed, Connection, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FENCE = "```"
LONGEST_LIST = 100_000
MODULE = type(sys)


class ObjectTable:
    """Objects that the tests' process refers to by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, one: Any) -> tuple[int, str]:
        """The object's number, which never changes, and the name of its type."""
        number = self._numbers.setdefault(id(one), len(self.objects))
        if number == len(self.objects):
            self.objects.append(one)
        return number, type(one).__name__


def serve(connection: Connection, text: str, before: str) -> None:
    """Run the program of a completion, send what it defines, and answer requests until the connection closes."""
    space: dict[str, Any] = {"__name__": "solution"}
    table = ObjectTable()
    connection.send(_answer(table, lambda: _execute(source(text, before), space)))
    while True:
        try:
            message = connection.receive()
        except Closed:
            return
        connection.send(_answer(table, _perform, message, table))


def source(text: str, before: str) -> str:
    """The last fenced code block, else the longest beginning of the text, in lines, that is Python.

    before: code before it: imports, or the beginning of a function that the text continues.
    """
    block = _last_block(text)
    if block is not None:
        return f"{before}\n{block}"
    lines = text.split("\n")
    for n in range(len(lines), 0, -1):
        whole = before + "\n".join(lines[:n])
        try:
            compile(whole, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            continue
        return whole
    return before + text


def _last_block(text: str) -> str | None:
    """The last closed code block, or an open one if there is no other."""
    blocks: list[list[str]] = []
    inside = False
    for line in text.split("\n"):
        if line.strip().startswith(FENCE):
            if not inside:
                blocks.append([])
            inside = not inside
        elif inside:
            blocks[-1].append(line)
    if inside and len(blocks) > 1:
        blocks.pop()
    return "\n".join(blocks[-1]) if blocks else None


def _execute(code: str, space: dict[str, Any]) -> dict[str, Any]:
    """Execute the code; the names that it defines: modules with their names, everything else with its value."""
    exec(compile(code, "<program>", "exec", dont_inherit=True), space)
    found = {name: value for name, value in space.items() if not name.startswith("__")}
    modules = {name: value.__name__ for name, value in found.items() if isinstance(value, MODULE)}
    return {"modules": modules, "values": {name: value for name, value in found.items() if name not in modules}}


def _perform(message: bytes, table: ObjectTable) -> Any:
    operation, arguments, named = decode(message, lambda number, _: table.objects[number])
    return OPERATIONS[operation](*arguments, **named)


def _answer(table: ObjectTable, action: Callable[..., Any], *given: Any) -> bytes:
    """The action's value or exception, as a message."""
    try:
        return encode(("value", action(*given)), table.number)
    except BaseException as error:  # noqa: BLE001 - sent to the tests' process
        return encode(("raised", *_raised(error)), table.number)


def _raised(error: BaseException) -> tuple[str, str]:
    """The nearest built-in class of an exception, and its text."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the program's __str__ may raise
        text = ""
    return kind.__name__, text[:500]


def _next(iterator: Any) -> tuple[bool, Any]:
    """Whether the iterator has ended, and its next value."""
    try:
        return False, next(iterator)
    except StopIteration:
        return True, None


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": lambda value, key: value[key],
    "len": len,
    "list": lambda value: list(itertools.islice(value, LONGEST_LIST)),
    "next": _next,
    "text": str,
}
