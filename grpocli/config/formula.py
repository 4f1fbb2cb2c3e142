"""What a part says of itself: its formula and its docstring.

Every part imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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


def class_doc(cls: type[Any]) -> str:
    """A class's docstring, or its name; the signature that `dataclass` writes does not count."""
    doc = cls.__dict__.get("__doc__") or ""
    return cls.__qualname__ if not doc or doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)


def summary(cls: type[Any]) -> str:
    """The first line of a class's docstring, or its name."""
    return class_doc(cls).splitlines()[0]
