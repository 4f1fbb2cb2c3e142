"""Where the code reads a config key, found in its syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.explain.keys import GroupReference, KeyReference

PACKAGE = Path(__file__).parents[1]
CHECKS = ("__post_init__",)
"""Functions that only check a value."""
LAST = ("launch", "plan", "explain", "report", "replay", "doctor", "evaluation", "cli")
"""Packages that look at a whole run; the readers in others are shown first."""


@dataclass(frozen=True, slots=True)
class Place:
    """A function that reads a key, and the line."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}"


def readers(shown: KeyReference | GroupReference) -> list[str]:
    """The functions that read a key, as `path:line function`; none for a group."""
    return [str(place) for place in places(shown)] if isinstance(shown, KeyReference) else []


def places(key: KeyReference, limit: int = 6) -> list[Place]:
    """The functions that read a key, one place for each.

    `X.FIELD` counts where X is the section's name (`run.train.minibatches`, `kl.beta`), `self` in a class with the
    field, or an argument annotated with such a class. An attribute that another name holds is not found.
    """
    field = key.variants[0].field
    section = key.name.rpartition(".")[0].rpartition(".")[2]
    classes = {base.__name__ for one in key.variants for base in one.owner.__mro__ if base is not object}
    classes |= {one.__name__ for variant in key.variants for one in _subclasses(variant.owner)}
    found: dict[tuple[str, str], Place] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if f".{field}" in source:
            path = f"grpocli/{file.relative_to(PACKAGE)}"
            for line, function in _reads(ast.parse(source), field, section, classes):
                found.setdefault((path, function), Place(path, line, function))
    read = [place for place in found.values() if place.function.rpartition(".")[2] not in CHECKS]
    return sorted(read, key=lambda place: place.path.split("/")[1] in LAST)[:limit]


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def _reads(tree: ast.AST, field: str, section: str, classes: set[str]) -> Iterator[tuple[int, str]]:
    """(line, qualified function) of each read of a field in a module."""
    yield from _in_body(tree, (), field, {section} - {""}, classes)


def _in_body(
    node: ast.AST, scope: tuple[str, ...], field: str, names: set[str], classes: set[str]
) -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            own = names | {"self"} if child.name in classes else names - {"self"}
            yield from _in_body(child, (*scope, child.name), field, own, classes)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            own = names | _annotated(child.args, classes)
            yield from _in_body(child, (*scope, child.name), field, own, classes)
        else:
            if isinstance(child, ast.Attribute) and child.attr == field and _last(child.value) in names:
                yield child.lineno, ".".join(scope) or "module"
            yield from _in_body(child, scope, field, names, classes)


def _annotated(arguments: ast.arguments, classes: set[str]) -> set[str]:
    """The arguments whose annotation is one of the classes."""
    every: Sequence[ast.arg] = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {
        one.arg for one in every if one.annotation is not None and ast.unparse(one.annotation).strip("'\"") in classes
    }


def _last(node: ast.expr) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
