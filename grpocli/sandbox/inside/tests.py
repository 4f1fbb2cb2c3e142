"""The tests' process: runs tests of a program that is in another process, out of its reach.

What the program defines is here by proxies; what they return is plain values. So a program cannot end the tests early,
print their result, patch what they compare with, or return an object that says it is equal to everything.
"""

from __future__ import annotations

import builtins
import os
import sys

from .protocol import Closed, Wire, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType
    from typing import Any


class Remote:
    """An object of the program's that is no plain value."""

    def __init__(self, ask: Callable[..., Any], number: int, kind: str) -> None:
        self.__dict__.update(_ask=ask, _number=number, _kind=kind)

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self, key)

    def __len__(self) -> int:
        return int(self._ask("len", self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list", self))

    def __next__(self) -> Any:
        ended, value = self._ask("next", self)
        if ended:
            raise StopIteration
        return value

    def __str__(self) -> str:
        return str(self._ask("text", self))

    def __bool__(self) -> bool:
        raise TypeError(f"the program gave an object of its type {self._kind}, which is neither true nor false here")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(self._number == other._number)
        raise TypeError(f"the program gave an object of its type {self._kind}, which cannot be compared")

    __hash__ = None  # type: ignore[assignment]


class Program:
    """What the tests' process knows of the program's."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def names(self) -> dict[str, Any]:
        """What the program defines. Raises what it raised."""
        found = self._received()
        imported = (name for name, module in found["modules"].items() if module == name)
        modules = {name: __import__(name) for name in imported if name in sys.stdlib_module_names}
        return {name: value for name, value in (modules | found["values"]).items() if not name.startswith("__")}

    def ask(self, what: str, /, *arguments: Any, **named: Any) -> Any:
        """Have the program do something. Raises what it raises."""
        self._wire.send(encode((what, arguments, named), _number))
        return self._received()

    def _received(self) -> Any:
        try:
            what, *rest = decode(self._wire.receive(), lambda number, kind: Remote(self.ask, number, kind))
        except Closed as closed:
            raise Closed(f"the program gave no answer: {closed}") from closed
        if what != "value":
            raise _error(*map(str, rest))
        return rest[0]


class Example:
    """What of the tests does not come from the program. Made before the program is heard; raises what is wrong with it.

    entry: the one name that is the program's; all others are then the reference's. Without it, Python's own names are
    the program's only where the reference defines them too, and what the reference imports is imported here.
    """

    def __init__(self, reference: str, entry: str, setup: str, tests: Sequence[str]) -> None:
        self._entry = entry
        self._own: dict[str, Any] = {"__name__": "tests"}
        self._reserved = {*dir(builtins), *sys.stdlib_module_names}
        if entry:
            exec(_compiled(reference, "<reference>"), self._own)
            self._own.pop(entry, None)  # or the reference would be tested where the program has none
        elif reference:
            defined, imports = _of(reference)
            self._reserved -= defined
            exec(imports, self._own)
        self._setup = _compiled(setup, "<setup>")
        try:
            exec(self._setup, dict(self._own))
        except NameError:  # it needs what the program defines
            pass
        self.tests = [_compiled(test, "<test>") for test in tests]

    def names(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """What tests may use, with those names of the program's that cannot judge it. Runs the setup."""
        if self._entry:
            space = {name: value for name, value in theirs.items() if name == self._entry} | self._own
        else:
            space = {name: value for name, value in theirs.items() if name not in self._reserved}
            modules = self._reserved & sys.stdlib_module_names
            space |= {name: __import__(name) for name in theirs if name in modules} | self._own
        exec(self._setup, space)
        return space


def _compiled(code: str, name: str) -> CodeType:
    return compile(code, name, "exec", dont_inherit=True)


def _of(reference: str) -> tuple[set[str], CodeType]:
    """The functions and classes that it defines, and what it imports."""
    import ast

    statements = ast.parse(reference).body
    imports: list[ast.stmt] = [one for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
    defined = {one.name for one in statements if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    return defined, compile(ast.Module(imports, []), "<reference>", "exec", dont_inherit=True)


def _error(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    # of a program's function, a StopIteration would end a loop of the test's without a word
    ends = (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends):
        try:
            return kind(text)
        except TypeError:  # it takes other arguments
            return RuntimeError(f"{name}: {text}")
    return RuntimeError(f"{name}: {text}")


def _number(value: Any) -> tuple[int, str]:
    if isinstance(value, Remote):
        return value._number, ""
    raise TypeError(f"a test gave the program a {type(value).__name__}, which is no plain value")


def run(wire: Wire, reference: str, entry: str, setup: str, tests: Sequence[str], out: int) -> None:
    """A line for the example: empty, or what is wrong with it. Then a line for each test: empty, or what was wrong."""
    examples: list[Example] = []
    broken = _problem(lambda: examples.append(Example(reference, entry, setup, tests)))
    _write(out, broken)
    if broken:
        return
    (example,) = examples
    space: dict[str, Any] = {}
    problem = _problem(lambda: space.update(example.names(Program(wire).names())))
    for test in example.tests:
        _write(out, problem or _problem(exec, test, space))


def _write(out: int, problem: str) -> None:
    os.write(out, " ".join(problem.split()).encode(errors="replace") + b"\n")


def _problem(action: Callable[..., object], *given: Any) -> str:
    try:
        action(*given)
    except AssertionError as error:
        return f"AssertionError: {str(error)[:500]}" if str(error) else "AssertionError"
    except BaseException as error:  # noqa: BLE001 - whatever a test raises, it did not pass
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""
