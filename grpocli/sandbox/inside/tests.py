"""The tests' process: runs the tests of a program that runs in another process.

The program's objects are proxies here, and their results are plain values. So a program cannot end the tests, write
their results, patch built-in functions that they use, or return an object that equals everything.
"""

from __future__ import annotations

import builtins
import os
import sys

from .protocol import Closed, Connection, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType
    from typing import Any

    Test = str | tuple[str, str]


class Remote:
    """A proxy of an object in the program's process."""

    def __init__(self, ask: Callable[..., Any], number: int, kind: str) -> None:
        self.__dict__.update(_ask=ask, _number=number, _kind=kind)

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        result, *changed = self._ask("call", self, *arguments, **named)
        if result is None:  # else a function could also empty a list with which its result is compared
            for one, other in zip([*arguments, *named.values()], changed, strict=True):
                if isinstance(one, list) and isinstance(other, list):
                    one[:] = other
                elif isinstance(one, dict | set) and type(one) is type(other):
                    one.clear()
                    one.update(other)
        return result

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
        raise TypeError(f"the program gave an object of its type {self._kind}, which has no truth value here")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(self._number == other._number)
        raise TypeError(f"the program gave an object of its type {self._kind}, which cannot be compared")

    __hash__ = None  # type: ignore[assignment]


class Program:
    """The connection to the program's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def names(self) -> dict[str, Any]:
        """The names that the program defines. Raises the program's exception."""
        found = self.ask("names")
        imported = (name for name, module in found["modules"].items() if module == name)
        modules = {name: __import__(name) for name in imported if name in sys.stdlib_module_names}
        return {name: value for name, value in (modules | found["values"]).items() if not name.startswith("__")}

    def ask(self, operation: str, /, *arguments: Any, **named: Any) -> Any:
        """The result of one of `program.OPERATIONS`. Raises the program's exception."""
        request = encode((operation, arguments, named), _number)
        try:
            self._connection.send(request)
            kind, *rest = decode(self._connection.receive(), lambda number, name: Remote(self.ask, number, name))
        except ConnectionError as error:
            raise Closed(f"the program gave no answer: {error}") from error
        if kind != "value":
            raise _error(*map(str, rest))
        return rest[0]


class Example:
    """The names that tests use and the program does not define. Made before the program sends anything.

    entry_point: the only name that tests take from the program; all others are the reference's. Without it, a built-in
    name or a standard module is taken from the program only if the reference defines it too, and the reference's
    imports are imported here.
    """

    def prepare(self, reference: str, entry_point: str, setup: str, tests: Sequence[Test]) -> None:
        """Raises the exception of a broken example."""
        self._entry_point = entry_point
        self._own: dict[str, Any] = {"__name__": "reference"}
        self._reserved = {*dir(builtins), *sys.stdlib_module_names}
        if entry_point:
            exec(_compiled(reference, "<reference>"), self._own)
            self._own.pop(entry_point, None)  # or the reference would be tested if the program does not define it
        elif reference:
            defined, imports = _definitions(reference)
            self._reserved -= defined
            exec(imports, self._own)
        self._own["__name__"] = "__main__"  # as a script, whose guard may hold the tests
        self._setup = _compiled(setup, "<setup>")
        try:
            exec(self._setup, dict(self._own))
        except NameError:  # it uses names that the program defines
            pass
        self.tests = [_compiled(test, "<test>") if isinstance(test, str) else test for test in tests]

    def names(self, defined: dict[str, Any]) -> dict[str, Any]:
        """The names for the tests, from those that the program defines. Runs the setup."""
        if self._entry_point:
            space = {name: value for name, value in defined.items() if name == self._entry_point} | self._own
        else:
            space = {name: value for name, value in defined.items() if name not in self._reserved}
            modules = self._reserved & sys.stdlib_module_names
            space |= {name: __import__(name) for name in defined if name in modules} | self._own
        exec(self._setup, space)
        return space


def _compiled(code: str, name: str) -> CodeType:
    return compile(code, name, "exec", dont_inherit=True)


def _definitions(reference: str) -> tuple[set[str], CodeType]:
    """The functions and classes that the reference defines, and its import statements."""
    import ast

    statements = ast.parse(reference).body
    imports: list[ast.stmt] = [one for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
    defined = {one.name for one in statements if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    return defined, compile(ast.Module(imports, []), "<reference>", "exec", dont_inherit=True)


def _error(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    # a StopIteration of the program would silently end a loop in a test
    ends = (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends):
        try:
            return kind(text)
        except TypeError:  # the class takes other arguments
            pass
    return RuntimeError(f"{name}: {text}")


def _number(value: Any) -> tuple[int, str]:
    if isinstance(value, Remote):
        return value._number, ""
    raise TypeError(f"a test gave the program a {type(value).__name__}, which is not a plain value")


def run(connection: Connection, reference: str, entry_point: str, setup: str, tests: Sequence[Test], out: int) -> None:
    """Run the tests and write one line for the example and one for each test: empty, or the error."""
    example, program, space = Example(), Program(connection), {}
    problem = _problem(example.prepare, reference, entry_point, setup, tests)
    _write(out, problem)
    if problem:
        return
    if any(isinstance(test, str) for test in tests):  # else it only reads and prints
        problem = _problem(lambda: space.update(example.names(program.names())))
    for test in example.tests:
        action = (_check_output, program, *test) if isinstance(test, tuple) else (exec, test, space)
        _write(out, problem or _problem(*action))


def _check_output(program: Program, given: str, wanted: str) -> None:
    """Raise AssertionError unless the program prints the wanted lines; space around a line does not count."""
    printed = str(program.ask("printed", given))
    found, expected = ([line.strip() for line in text.strip().split("\n")] for text in (printed, wanted))
    if found != expected:
        raise AssertionError(f"for {given[:100]!r} it printed {printed[:100]!r}, expected {wanted[:100]!r}")


def _write(out: int, problem: str) -> None:
    os.write(out, " ".join(problem.split()).encode(errors="replace") + b"\n")


def _problem(action: Callable[..., object], *given: Any) -> str:
    try:
        action(*given)
    except AssertionError as error:
        return f"AssertionError: {str(error)[:500]}" if str(error) else "AssertionError"
    except BaseException as error:  # noqa: BLE001 - a test that raises anything fails
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""
