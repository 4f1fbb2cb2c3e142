"""What a part says of its own mathematics. Imported by every part: nothing heavy here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpocli.config.field_docs import summary


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


def settings(part: object) -> dict[str, Any]:
    """A part's fields with their values."""
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
