"""What a part says of itself: its formula, its docstring, and the docstring below each of its fields.

Every part imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Formula:
    """The contribution of a part to the objective, with its current values.

    lines: formulas in Unicode, at most 61 characters each; none if the part changes nothing.
    symbols: {symbol in the lines: the part's field with its value}.
    source: the papers, with equations. note: a sentence below the lines, or why there are none.

    In all of them s_i is the score of completion o_i, A_i its advantage, r the ratio of policies, ℓ_it the
    policy-gradient term of token t, to be minimised, ρ_it its correction, D_it the KL estimate, H_it the entropy and
    w_i the weight of a completion's sum over tokens; mean_G, std_G and Σ_G run over the completions of o_i's question.
    """

    lines: tuple[str, ...] = ()
    symbols: Mapping[str, str] = field(default_factory=dict)
    source: tuple[str, ...] = ()
    note: str = ""


@runtime_checkable
class HasFormula(Protocol):
    """A part that states its formula; parts of users need not."""

    def formula(self) -> Formula: ...


def formula_of(part: object) -> Formula:
    """The formula of a part, or the first line of its docstring if it has none."""
    return part.formula() if isinstance(part, HasFormula) else Formula((summary(type(part)),))


def settings(part: object) -> dict[str, Any]:
    """{field: value} of a part; empty if it is not a dataclass."""
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}


def class_doc(cls: type[Any]) -> str:
    """A class's docstring, or its name; the signature that `dataclass` writes does not count."""
    doc = cls.__dict__.get("__doc__") or ""
    return cls.__qualname__ if not doc or doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)


def summary(cls: type[Any]) -> str:
    """The first line of a class's docstring, or its name."""
    return class_doc(cls).splitlines()[0]


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
