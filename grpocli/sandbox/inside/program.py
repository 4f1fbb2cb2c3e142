"""The program's process: runs the code that a model wrote, and does what the tests' process asks of it."""

from __future__ import annotations

import itertools
import sys

from .protocol import Closed, Wire, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FENCE = "```"
LONGEST_LIST = 100_000
MODULE = type(sys)


class Kept:
    """Objects that the tests' process knows by a number: the same one has always the same."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, one: Any) -> tuple[int, str]:
        """And the name of its type."""
        number = self._numbers.setdefault(id(one), len(self.objects))
        if number == len(self.objects):
            self.objects.append(one)
        return number, type(one).__name__


def serve(wire: Wire, text: str, before: str) -> None:
    """Run the program of a completion, say what it defines, and answer until the other end is gone."""
    space: dict[str, Any] = {"__name__": "solution"}
    kept = Kept()
    wire.send(_answer(kept, lambda: _defined(source(text, before), space)))
    while True:
        try:
            message = wire.receive()
        except Closed:
            return
        wire.send(_answer(kept, _done, message, kept))


def source(text: str, before: str) -> str:
    """What is in the last fenced block of code, else the lines of the text up to where they are Python no more.

    before: what comes before it: imports, or the beginning of a function that the text goes on with.
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
    """The last block that is closed, or one that is still open where there is no other."""
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


def _defined(code: str, space: dict[str, Any]) -> dict[str, Any]:
    """Run it, and say what it defines: modules by their name, everything else as it is sent."""
    exec(compile(code, "<program>", "exec", dont_inherit=True), space)
    found = {name: value for name, value in space.items() if not name.startswith("__")}
    modules = {name: value.__name__ for name, value in found.items() if isinstance(value, MODULE)}
    return {"modules": modules, "values": {name: value for name, value in found.items() if name not in modules}}


def _done(message: bytes, kept: Kept) -> Any:
    what, arguments, named = decode(message, lambda number, _: kept.objects[number])
    return OPERATIONS[what](*arguments, **named)


def _answer(kept: Kept, action: Callable[..., Any], *given: Any) -> bytes:
    """Its value, or what it raised."""
    try:
        return encode(("value", action(*given)), kept.number)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the tests' process gets it
        return encode(("raised", *_raised(error)), kept.number)


def _raised(error: BaseException) -> tuple[str, str]:
    """The nearest built-in kind, and what it says."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an error of the model's own may raise another one when it is printed
        text = ""
    return kind.__name__, text[:500]


def _next(iterator: Any) -> tuple[bool, Any]:
    """Whether it has ended, and what comes."""
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
