"""The program's process: executes the program and answers requests of the tests' process."""

from __future__ import annotations

import itertools
import sys

from .protocol import Connection, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SCRIPT = """\
__import__("builtins").exit = __import__("builtins").quit = __import__("sys").exit
exec(compile(__import__("sys").argv.pop(), "<program>", "exec"))
"""
"""Executes its argument as a script. Python without `site` lacks exit and quit."""
LONGEST_LIST = 100_000
MODULE, END = type(sys), object()


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


def serve(connection: Connection, code: str) -> None:
    """Answer requests until the connection closes: for what the program defines, prints and does."""
    space: dict[str, Any] = {"__name__": "solution"}
    table = ObjectTable()
    operations = OPERATIONS | {
        "names": lambda: _execute(code, space),
        "printed": lambda given: _output(code, given),
    }
    while True:
        try:
            message = connection.receive()
        except ConnectionError:
            return
        connection.send(_answer(message, table, operations))


def _output(code: str, given: str) -> str:
    """What the program prints as a script with this standard input. Raises RuntimeError if it fails."""
    import subprocess  # here, since other programs need not wait for it

    *command, _ = (word for word in sys.orig_argv if word != "-u")  # without our code
    done = subprocess.run([*command, SCRIPT, code], input=given.encode(), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RuntimeError(f"the program ended with exit code {done.returncode}")
    return done.stdout.decode(errors="replace")


def _execute(code: str, space: dict[str, Any]) -> dict[str, Any]:
    """Execute the code; the names that it defines: modules with their names, everything else with its value."""
    exec(compile(code, "<program>", "exec", dont_inherit=True), space)
    found = {name: value for name, value in space.items() if not name.startswith("__")}
    modules = {name: value.__name__ for name, value in found.items() if isinstance(value, MODULE)}
    return {"modules": modules, "values": {name: value for name, value in found.items() if name not in modules}}


def _answer(message: bytes, table: ObjectTable, operations: dict[str, Callable[..., Any]]) -> bytes:
    """The value or the exception of the operation that a message asks for, as a message."""
    try:
        operation, arguments, named = decode(message, lambda number, _: table.objects[number])
        return encode(("value", operations[operation](*arguments, **named)), table.number)
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


def _call(function: Any, /, *arguments: Any, **named: Any) -> tuple[Any, ...]:
    """The result and, if it is None, the arguments: a function that works in place has changed them."""
    result = function(*arguments, **named)
    return (None, *arguments, *named.values()) if result is None else (result,)


def _next(iterator: Any) -> tuple[bool, Any]:
    """Whether the iterator has ended, and its next value."""
    value = next(iterator, END)
    return (True, None) if value is END else (False, value)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "get": getattr,
    "set": setattr,
    "item": lambda value, key: value[key],
    "len": len,
    "list": lambda value: list(itertools.islice(value, LONGEST_LIST)),
    "next": _next,
    "text": str,
}
