"""The program's process: executes the program and answers requests of the tests' process."""

from __future__ import annotations

import itertools
import sys

from .protocol import Closed, Connection, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

FENCES = ("```", "~~~")
PYTHON = ("python", "python3", "py", "py3")
SCRIPT = """\
__import__("builtins").exit = __import__("builtins").quit = __import__("sys").exit
exec(compile(__import__("sys").argv.pop(), "<program>", "exec"))
"""
"""Executes its argument as a script. Python without `site` lacks exit and quit."""
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


def serve(connection: Connection, text: str, before: str, names: Sequence[str]) -> None:
    """Answer requests until the connection closes: for what the program of a completion defines, prints and does."""
    space: dict[str, Any] = {"__name__": "solution"}
    table = ObjectTable()
    operations = OPERATIONS | {
        "names": lambda: _execute(source(text, before, names), space),
        "printed": lambda given: _printed(source(text, before, names), given),
    }
    while True:
        try:
            message = connection.receive()
        except Closed:
            return
        connection.send(_answer(table, _perform, message, table, operations))


def source(text: str, before: str, names: Sequence[str]) -> str:
    """The code block with the program, else the longest beginning of the text, in lines, that is Python.

    before: code before it: imports, or the beginning of a function that the text continues. names: see `_block`.
    """
    block = _block(text, names)
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


def _block(text: str, names: Sequence[str]) -> str | None:
    """The last code block of Python that defines one of the names, else the last of Python, of no language, of any."""
    blocks = _blocks(text)
    tagged = [code for language, code in blocks if language in PYTHON]
    plain = [code for language, code in blocks if not language]
    defining = [code for language, code in blocks if language in ("", *PYTHON) and _defines(code, names)]
    best = defining or tagged or plain or [code for _, code in blocks]
    return "\n".join(best[-1]) if best else None


def _blocks(text: str) -> list[tuple[str, list[str]]]:
    """The language and the lines of each closed code block, or of an open one if there is no other."""
    blocks: list[tuple[str, list[str]]] = []
    fence, indent = "", 0
    for line in text.split("\n"):
        bare = line.strip()
        if fence and bare.startswith(fence) and not bare.strip(fence[0]):
            fence = ""
        elif fence:
            blocks[-1][1].append(line[indent:] if not line[:indent].strip() else line)
        elif bare.startswith(FENCES):
            language = bare.lstrip(bare[0])
            fence, indent = bare[: len(bare) - len(language)], len(line) - len(line.lstrip())
            words = "".join(c if c.isalnum() else " " for c in language.lower()).split()
            blocks.append((words[0] if words else "", []))
    if fence and len(blocks) > 1:
        blocks.pop()
    return blocks


def _defines(code: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a function, a class or an assignment at the margin has one of the names."""
    for line in code:
        words = line.replace("(", " ").replace(":", " ").removeprefix("async ").split(maxsplit=2)
        is_definition = len(words) > 1 and line[:1].strip() and (words[0] in ("def", "class") or words[1] == "=")
        if is_definition and words[words[1] != "="] in names:
            return True
    return False


def _printed(code: str, given: str) -> str:
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


def _perform(message: bytes, table: ObjectTable, operations: dict[str, Callable[..., Any]]) -> Any:
    operation, arguments, named = decode(message, lambda number, _: table.objects[number])
    return operations[operation](*arguments, **named)


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
