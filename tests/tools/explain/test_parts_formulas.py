"""The formula, source and symbols of every registered part."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from algorithms_page import VARIANTS

from grpocli.algorithm.algorithm import PARTS
from grpocli.algorithm.kl import K3
from grpocli.algorithm.objective import Clip
from grpocli.composition.compose import register_parts
from grpocli.config.parts import registered
from grpocli.config.user_parts import choice_of
from grpocli_tools.explain.explanation import part_section
from grpocli_tools.explain.formulas import Formula, formula_of
from grpocli_tools.explain.render import LABEL, WIDTH

register_parts()
CHOICES = [(kind, choice, made) for kind in PARTS for choice, made in registered(f"algorithm/{kind}").items()]
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


def test_every_kind_of_part_is_covered() -> None:
    assert {kind for kind, _, _ in CHOICES} == set(PARTS)
    assert len(CHOICES) >= 24


@pytest.mark.parametrize(("kind", "choice", "made"), CHOICES, ids=str)
def test_every_part_has_a_formula_with_its_source_or_a_reason(kind: str, choice: str, made: type[Any]) -> None:
    assert formula_of.dispatch(made) is not formula_of.dispatch(object)
    for part in instances(made):
        formula = formula_of(part)
        if formula.lines:
            assert all(formula.source), "a formula names its paper"
            assert formula.source
        else:
            assert formula.note, "a part without a formula gives the reason"


@pytest.mark.parametrize(("kind", "choice", "made"), CHOICES, ids=str)
def test_every_field_is_a_symbol_or_a_setting(kind: str, choice: str, made: type[Any]) -> None:
    for part in instances(made):
        fields = {f.name for f in dataclasses.fields(made)}
        assert set(formula_of(part).symbols.values()) <= fields
        section = part_section(f"algorithm/{kind}", part)
        keys = {s.key for s in section.symbols} | {key for key, _ in section.settings}
        assert keys == {f"algorithm.{kind}.{name}" for name in fields}


@pytest.mark.parametrize(("kind", "choice", "made"), CHOICES, ids=str)
def test_formulas_fit_on_80_columns_and_name_their_symbols(kind: str, choice: str, made: type[Any]) -> None:
    for part in instances(made):
        formula = formula_of(part)
        for line in formula.lines:
            assert len(line) < WIDTH - LABEL, line
        coefficients = {"kl": "β", "entropy": "λ"}  # these are part of the loss
        for symbol in formula.symbols:
            said = " ".join((*formula.lines, formula.note, coefficients.get(kind, "")))
            assert symbol in said


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


def test_variants_of_the_document_exist() -> None:
    known = {(kind, choice) for kind, choice, _ in CHOICES}
    assert set(VARIANTS) <= known


def test_values_change_lines() -> None:
    plain, sequence = formula_of(Clip()), formula_of(Clip(level="sequence"))
    assert plain.lines[0] == "r_it = π_θ(o_it) / π_old(o_it)"
    assert sequence.lines[0] == "r_i = ( Π_t π_θ(o_it) / π_old(o_it) )^(1 / |o_i|)"
    assert any("GSPO" in source for source in sequence.source)
    assert "c" not in plain.symbols
    assert formula_of(Clip(dual=3.0)).symbols["c"] == "dual"
    assert formula_of(Clip(dual=3.0)).lines[-1] == "ℓ_it = −g_it where A_i ≥ 0,  −max(g_it, c A_i) where A_i < 0"
    assert formula_of(Clip(delta=3.0)).lines[1] == "b_it = min(r_it, δ)"
    assert not any("DAPO" in source for source in plain.source)
    assert any("DAPO" in source for source in formula_of(Clip(high=0.28)).source)
    assert formula_of(K3(beta=0.0)).lines == ()
    assert formula_of(K3(sync_every=2)).symbols == {"β": "beta", "m": "sync_every", "α": "sync_alpha"}


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


def test_a_class_without_a_docstring_shows_its_name() -> None:
    @dataclass(frozen=True)
    class Silent:
        scale: float = 1.0

    assert formula_of(Silent()).lines[0].endswith("Silent")


def test_a_part_is_shown_by_its_choice() -> None:
    assert choice_of("algorithm/kl", K3()) == "k3"
