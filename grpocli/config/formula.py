"""The formula of a part. Every part imports this module, so it imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from grpocli.config.field_docs import summary


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
