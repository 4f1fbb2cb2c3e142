"""What a part says of its own mathematics. Imported by every part: nothing heavy here."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Formula:
    """What a part contributes to the objective with the values that it has.

    lines: formulas in Unicode, at most 61 characters each; none where the part changes nothing.
    symbols: each symbol of the lines with the name of the part's field that holds it.
    source: the papers, with equations. note: a sentence below the lines, or why there are none.

    In all of them s_i is the score of completion o_i, A_i its advantage, r the ratio of policies, ℓ_it the
    policy-gradient term of token t, to be minimised, ρ_it its correction, D_it the KL estimate, H_it the entropy and
    w_i the weight of a completion's sum over tokens; mean_G, std_G and Σ_G run over the completions of o_i's question.
    """

    lines: tuple[str, ...] = ()
    symbols: Mapping[str, str] = field(default_factory=dict)
    source: tuple[str, ...] = ()
    note: str = ""


def formula_of(part: object) -> Formula:
    """A part's own formula, or for a part without one the first line of its docstring."""
    own = getattr(part, "formula", None)
    if own is None:
        return Formula((summary(type(part)),))
    formula: Formula = own()
    return formula


def summary(cls: type[Any]) -> str:
    """The first line of a class's docstring, or its name."""
    return (_own_doc(cls) or cls.__qualname__).splitlines()[0]


def settings(part: object) -> dict[str, Any]:
    """A part's fields with their values."""
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}


def meanings(cls: type[Any]) -> dict[str, str]:
    """{field: meaning}, the sentence after `field: ` in the docstrings of a part and of what it inherits from."""
    names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        for paragraph in _own_doc(owner).split("\n\n"):
            found |= _meanings(" ".join(paragraph.split()), names)
    return found


def _meanings(text: str, names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    name = "|".join(map(re.escape, names))
    marks = list(re.finditer(rf"(?:^|(?<=[.)] ))({name})((?:, (?:{name}))*): ", text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return {
        field_name: text[mark.end() : end].partition(". ")[0].strip().rstrip(".")
        for mark, end in zip(marks, ends, strict=False)
        for field_name in (mark[1] + mark[2]).split(", ")
    }


def _own_doc(cls: type[Any]) -> str:
    """A class's docstring as it was written; not the signature that a dataclass without one is given."""
    doc = cls.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)
