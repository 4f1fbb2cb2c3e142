"""What parts say of themselves: their values, and the docstrings of their classes and below their fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from itertools import pairwise
from typing import Any


def class_doc(cls: type[Any]) -> str:
    """A class's docstring, or its name; the signature that `dataclass` writes does not count."""
    doc = cls.__dict__.get("__doc__") or ""
    return cls.__qualname__ if not doc or doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)


def summary(cls: type[Any]) -> str:
    """The first line of a class's docstring, or its name."""
    return class_doc(cls).splitlines()[0]


def settings(part: object) -> dict[str, Any]:
    """{field: value} of a part; empty if it is not a dataclass."""
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}


def field_docs(cls: type[Any]) -> dict[str, str]:
    """{field: the docstring below it, on one line}, of a dataclass and its bases, read from their source."""
    names = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        found |= _own_field_docs(owner)
    return {name: doc for name, doc in found.items() if name in names}


def _own_field_docs(cls: type[Any]) -> dict[str, str]:
    try:
        source = inspect.getsource(cls)
        (definition,) = ast.parse(textwrap.dedent(source)).body
    except (OSError, TypeError, SyntaxError):  # a class without source, such as object
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
