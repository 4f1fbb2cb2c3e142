"""The formula, source and symbols of every registered part."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from grpocli.algorithm.algorithm import PARTS
from grpocli.composition.compose import register_parts
from grpocli.config.parts import CLASSES, choices_of
from grpocli_tools.explain.explanation import part_section
from grpocli_tools.explain.formulas import Formula, formula_of, written_formulas

register_parts()
CHOICES = [(kind, one, CLASSES[f"algorithm/{kind}/{one}"]) for kind in PARTS for one in choices_of(f"algorithm/{kind}")]
VALUES: dict[str, list[Any]] = {
    "level": ["token", "sequence"],
    "dual": [None, 3.0],
    "delta": [None, 4.0],
    "high": [1.5, 1.6],
    "weigh": ["none", "token", "sequence"],
    "drop": ["none", "token", "sequence"],
    "low": [0.2],
    "drop_above": [None, 0.1],
    "divergence": ["tv", "kl"],
    "drift": [0.0, 0.1],
    "tau": [0.0, 0.1],
    "over": ["samples", "tokens"],
    "scale": ["none", "others"],
    "beta": [0.0, 0.04],
    "on_policy": [False, True],
    "sync_every": [0, 5],
    "scope": ["batch", "group", "micro_batch"],
    "informative_only": [False, True],
    "mask_truncated": [False, True],
    "on_exhausted": ["train_partial", "error"],
    "surplus": ["discard", "carry"],
    "reward": [None, "math", "score"],
}


def instances(made: type[Any]) -> list[Any]:
    """A part with every combination of the values that may change its formula."""
    names = [f.name for f in dataclasses.fields(made) if f.name in VALUES]
    return [made(**dict(zip(names, values, strict=True))) for values in itertools.product(*(VALUES[n] for n in names))]


@pytest.mark.parametrize(("kind", "choice", "made"), CHOICES, ids=str)
def test_every_part_has_a_formula_that_names_its_source_and_symbols(kind: str, choice: str, made: type[Any]) -> None:
    """Or it gives a reason; every field of a part is a symbol or a setting."""
    assert made.__name__ in written_formulas() or formula_of.dispatch(made) is not formula_of.dispatch(object)
    fields = {f.name for f in dataclasses.fields(made)}
    of_the_loss = {"kl": "β", "entropy": "λ"}.get(kind, "")
    for part in instances(made):
        formula = formula_of(part)
        assert (formula.source and all(formula.source)) if formula.lines else formula.note
        assert set(formula.symbols.values()) <= fields
        said = " ".join((*formula.lines, formula.note, of_the_loss))
        assert [symbol for symbol in formula.symbols if symbol not in said] == []
        section = part_section(f"algorithm/{kind}", part)
        keys = {s.key for s in section.symbols} | {key for key, _ in section.settings}
        assert keys == {f"algorithm.{kind}.{name}" for name in fields}


def test_no_symbol_has_two_meanings() -> None:
    """Parts of different kinds are shown together, so what one defines another does not define otherwise."""
    meanings: dict[str, dict[str, set[str]]] = {}
    for kind, _, made in CHOICES:
        for formula in map(formula_of, instances(made)):
            defined = [piece.partition(" = ") for line in formula.lines for piece in line.split(";  ")]
            said = [(name, right) for name, equals, right in defined if equals and " " not in name]
            for symbol, meaning in [*said, *formula.symbols.items()]:
                meanings.setdefault(symbol, {}).setdefault(kind, set()).add(meaning)
    shared = {symbol: by_kind for symbol, by_kind in meanings.items() if len(by_kind) > 1}
    assert {symbol for symbol, by_kind in shared.items() if len(set.union(*by_kind.values())) > 1} == set()


def test_a_part_without_a_formula_shows_its_docstring() -> None:
    @dataclass(frozen=True)
    class Mine:
        """-r A only."""

        scale: float = 1.0
        """Factor of r."""

    assert formula_of(Mine()) == Formula(("-r A only.",))
    section = part_section("algorithm/objective", Mine())
    assert section.settings[0] == ("algorithm.objective.scale", "1")
    assert section.choice.endswith("Mine")
