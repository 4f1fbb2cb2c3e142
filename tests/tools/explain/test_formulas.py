"""Every part has a formula, and printed formulas give the code's values: they are evaluated on random numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import unicodedata
from typing import Any

import pytest
import torch

from grpocli.algorithm.advantage import (
    BatchStd,
    Center,
    Difficulty,
    LeaveOneOut,
    Mad,
    MaxRL,
    NoAdvantage,
    ReinforcePlusPlus,
    Std,
)
from grpocli.algorithm.aggregate import Constant, SequenceMean, TokenMean, Totals
from grpocli.algorithm.algorithm import PARTS
from grpocli.algorithm.correction import Preset, SequenceMask, SequenceTruncate, TokenMask, TokenTruncate
from grpocli.algorithm.kl import K1, K2, K3
from grpocli.algorithm.objective import Cispo, Clip, Dppo, Geometric, Mirror, Sapo
from grpocli.composition.compose import build_run, compose, register_parts
from grpocli.config.parts import CLASSES, choices_of
from grpocli_tools.explain.explanation import explanation, part_section
from grpocli_tools.explain.formulas import Formula, formula_of, written_formulas

register_parts()
CHOICES = [(kind, one, CLASSES[f"algorithm/{kind}/{one}"]) for kind in PARTS for one in choices_of(f"algorithm/{kind}")]
VALUES: dict[str, list[Any]] = {
    **{key: [False, True] for key in ("on_policy", "informative_only", "mask_truncated")},
    **{key: ["none", "token", "sequence"] for key in ("weigh", "drop")},
    **{key: [0.0, 0.1] for key in ("drift", "tau")},
    "level": ["token", "sequence"],
    "dual": [None, 3.0],
    "delta": [None, 4.0],
    "high": [1.5, 1.6],
    "low": [0.2],
    "drop_above": [None, 0.1],
    "divergence": ["tv", "kl"],
    "over": ["samples", "tokens"],
    "scale": ["none", "others"],
    "beta": [0.0, 0.04],
    "sync_every": [0, 5],
    "scope": ["batch", "group", "micro_batch"],
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


NAMES = {
    "min": min,
    "max": max,
    "exp": math.exp,
    "log": math.log,
    "clip": lambda x, low, high: min(max(x, low), high),
    "σ": lambda x: 1 / (1 + math.exp(-x)),
    "sg": lambda x: x,
    "mean_G": lambda xs: sum(xs) / len(xs),
    "Σ_G": sum,
    "sqrt": math.sqrt,
    "sign": lambda x: (x > 0) - (x < 0),
}


def python_of(formula: str) -> str:
    """A formula's right side as a Python expression."""
    text = formula.replace("−", "-").replace("≤", "<=").replace("≥", ">=")
    text = re.sub(r"sg\[(.*)\]", r"sg(\1)", text)
    text = re.sub(r"\( Π_t (.*) \)\^\(1 / \|o_i\|\)", r"product(lambda o_it: \1)**(1 / length)", text)
    text = text.replace("Σ_j∈U |o_j|", "tokens_U").replace("Σ_G |o_j|", "tokens_G").replace("|o_i|", "length")
    text = re.sub(r"log (π_\w+\(o_it\)|r_it)", r"log(\1)", text)
    text = re.sub(r"√\( (.*) \)", r"sqrt(\1)", text)
    text = re.sub(r"mean_G \|s - mean_G s\|", "mean_G([abs(s - mean_G(all_s)) for s in all_s])", text)
    text = re.sub(r"Σ_G \(s - mean_G s\)²", "Σ_G([(s - mean_G(all_s))**2 for s in all_s])", text)
    text = re.sub(r"(mean|std|MAD)_G s\b", lambda m: "mean_G(all_s)" if m[1] == "mean" else f"{m[1]}_G", text)
    text = text.replace("²", "**2")
    text = re.sub(r"(.*) where (.*?), else (.*)", r"(\1) if \2 else (\3)", text)
    text = re.sub(r"(.*) where (.*?),  (.*) where .*", r"(\1) if \2 else (\3)", text)
    words = r"(?!(?:if|else|for|in|lambda|and)\b)"
    return re.sub(
        rf"(?<!\bif)(?<!\belse)(?<!\bfor)(?<!\band)(?<!\bin)(?<!lambda)(?<=[\w)]) {words}(?=[\w(])", " * ", text
    )


def computed(lines: tuple[str, ...], wanted: str, values: dict[str, Any]) -> float:
    """The value of a symbol that one of the lines defines, from the symbols on the right sides."""
    definitions = {}
    for line in lines:
        for piece in line.split(";  "):
            name, equals, right = piece.partition(" = ")
            if equals and " " not in name.replace("_G s", ""):
                definitions[name.replace("_G s", "_G")] = right.split(",  n scores")[0].strip()
    scope: dict[str, Any] = {identifier(name): value for name, value in (NAMES | values).items()}
    definitions = {identifier(name): identifier(python_of(right)) for name, right in definitions.items()}
    wanted = identifier(wanted)
    while wanted not in scope:
        ready = [name for name in definitions if name not in scope and not _unknown(definitions[name], scope)]
        assert ready, f"{wanted} cannot be computed from {definitions}"
        for name in ready:
            scope[name] = eval(definitions[name], scope)
    return float(scope[wanted])


def identifier(text: str) -> str:
    """Python normalises identifiers: ℓ becomes l."""
    return unicodedata.normalize("NFKC", text)


def _unknown(expression: str, scope: dict[str, Any]) -> set[str]:
    names = set(re.findall(r"(?<![\w.])[^\W\d]\w*", expression))
    bound = {"if", "else", "for", "in", "lambda", "and", "abs"} | ({"o_it"} if "lambda" in expression else set())
    bound |= {"s"} if "for s in" in expression else set()
    return names - bound - set(scope)


T = 3
CLIPS = [
    Clip(low=0.1, high=0.3, level=level, dual=dual, delta=delta)
    for level, dual, delta in itertools.product(("token", "sequence"), (None, 1.5), (None, 1.7))
]


def noise(seed: int, *shape: int, scale: float = 0.6) -> torch.Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def held(part: object, formula: Formula) -> dict[str, Any]:
    """The values of the formula's symbols that are fields of the part."""
    return {symbol: getattr(part, field) for symbol, field in formula.symbols.items()}


def policies(new: torch.Tensor, old: torch.Tensor, t: int, **more: torch.Tensor) -> dict[str, Any]:
    """Probabilities of one row's tokens as functions, with the names for a product over them."""

    def product(factor: Any) -> float:
        return math.prod(factor(k) for k in range(len(new)))

    named = {"π_θ": new, "π_old": old, **more}
    functions = {name: lambda k, logp=logp: math.exp(logp[k]) for name, logp in named.items()}
    return {**functions, "o_it": t, "length": len(new), "product": product}


OTHERS = [
    Cispo(high=0.2),
    Cispo(low=0.1, high=0.2),
    Sapo(tau_positive=0.7, tau_negative=2.0),
    Mirror(tau=0.0),
    Mirror(tau=0.7),
    *(Dppo(low=0.05, high=0.1, divergence=kind, drift=drift) for kind in ("tv", "kl") for drift in (0.0, 0.3)),
]


@pytest.mark.parametrize("part", [*CLIPS, *OTHERS], ids=repr)
def test_the_objectives_formula_gives_its_loss(part: Any) -> None:
    for seed in range(12):
        old = -noise(seed, T).abs()
        new, advantage = (old + noise(seed + 100, T)).clamp(max=-1e-3), noise(seed + 200, 1)
        loss_BT, _ = part(new[None], old[None], advantage, torch.ones(1, T))
        formula = formula_of(part)
        for t in range(T):
            values = policies(new, old, t) | held(part, formula) | {"A_i": advantage.item()}
            assert computed(formula.lines, "ℓ_it", values) == pytest.approx(loss_BT[0, t].item(), rel=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_formula_of_geometric_gives_its_loss(seed: int) -> None:
    part = Geometric(low=0.1, high=0.2)
    old = -noise(seed, T).abs()
    new, advantage = old + noise(seed + 100, T), noise(seed + 200, 1)
    *lines, last = formula_of(part).lines
    assert last == "ℓ_it = −A_i exp( Σ_t y_it / |o_i| )"
    known = held(part, formula_of(part)) | {"A_i": advantage.item()}
    y = [computed(tuple(lines), "y_it", policies(new, old, t) | known) for t in range(T)]
    loss_BT, _ = part(new[None], old[None], advantage, torch.ones(1, T))
    assert loss_BT[0].tolist() == pytest.approx([-advantage.item() * math.exp(sum(y) / T)] * T, rel=1e-12)


@pytest.mark.parametrize("made", [TokenTruncate, TokenMask, SequenceTruncate, SequenceMask])
@pytest.mark.parametrize("seed", range(3))
def test_the_corrections_formula_gives_its_weights(made: type[Preset], seed: int) -> None:
    part = made(min=0.8, max=1.2)
    sampler = -noise(seed, T).abs()
    old = sampler + noise(seed + 100, T, scale=0.3)
    weight = part(old[None], sampler[None], torch.ones(1, T)).expand(1, T)
    formula = formula_of(part)
    for t in range(T):
        values = policies(old, old, t, μ=sampler) | held(part, formula)
        assert computed(formula.lines, "ρ_it", values) == pytest.approx(weight[0, t].item(), rel=1e-12)


@pytest.mark.parametrize("made", [K1, K2, K3])
@pytest.mark.parametrize("on_policy", [False, True])
def test_the_kl_estimators_formula_gives_its_values(made: Any, on_policy: bool) -> None:
    part = made(on_policy=on_policy, sync_every=3)
    old = -noise(0, T).abs()
    new, ref = old + noise(1, T), old + noise(2, T)
    new[0], ref[0] = old[0], old[0] + 5  # k3 is bounded there
    formula = formula_of(part)
    lines = tuple(line for line in formula.lines if not line.startswith("after every"))
    for t in range(T):
        values = policies(new, old, t, π_ref=ref) | held(part, formula)
        assert computed(lines, "D_it", values) == pytest.approx(part(new, old, ref)[t].item(), rel=1e-12)


@pytest.mark.parametrize(
    "part", [Std(eps=0.3), Mad(eps=0.3), Center(), LeaveOneOut(), MaxRL(), NoAdvantage()], ids=repr
)
def test_the_advantages_formula_gives_its_values(part: Any) -> None:
    scores = noise(0, 5).abs()
    formula = formula_of(part)
    lines = formula.lines
    if isinstance(part, LeaveOneOut):  # the second of two equal forms
        lines = (f"A_i{formula.lines[1].lstrip(' ').replace('=', ' =', 1)}",)
    for i, s in enumerate(scores.tolist()):
        values = {"s_i": s, "all_s": scores.tolist(), "n": 5} | held(part, formula)
        assert computed(lines, "A_i", values) == pytest.approx(part(scores[None])[0, i].item(), rel=1e-12)


AGGREGATES = [
    SequenceMean(),
    Constant(length=7),
    *(TokenMean(scope, informative) for scope in ("batch", "group", "micro_batch") for informative in (False, True)),
]


@pytest.mark.parametrize("part", AGGREGATES, ids=repr)
def test_the_aggregates_formula_gives_its_weights(part: Any) -> None:
    lengths, groups = [1, 4, 2, 3, 2, 5], [0, 0, 1, 1, 2, 2]
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.5, -0.5])  # the second group has no signal
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    ids = torch.tensor(groups)
    weights = part(mask, ids, Totals.of(advantages, mask.sum(1), ids, micro_batches=4))
    formula = formula_of(part)
    only = getattr(part, "informative_only", False)
    counted = [not only or group != 1 for group in groups]
    assert only == any("A_j ≠ 0;  else w_i = 0" in line for line in formula.lines)
    for i, group in enumerate(groups):
        values = {
            "N": 6,
            "B": 4,
            "K": 2 if only else 3,
            "length": lengths[i],
            "tokens_U": sum(n for n, c in zip(lengths, counted, strict=True) if c),
            "tokens_G": sum(n for n, g in zip(lengths, groups, strict=True) if g == group),
        } | held(part, formula)
        expected = computed(formula.lines[:1], "w_i", values) if counted[i] else 0.0
        assert weights[i].item() == pytest.approx(expected, rel=1e-12)


def test_the_question_weights_formula_gives_its_values() -> None:
    part = Difficulty(temperature=0.7)
    accuracy = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]).double()
    scores = accuracy + torch.tensor([[0.0], [0.0], [0.0], [0.0]]).double()
    scores[3, 0] = 0.5  # differs, although nothing was right: its accuracy counts as 1
    formula = formula_of(part)
    line = formula.lines[1].partition(",  ")[0].replace("|Q|", "size_Q")
    line = line.replace("Σ_p∈Q exp(−a_p / T)", "sum_Q")
    a = {0: 1 / 3, 1: 2 / 3, 3: 1.0}
    values = {"size_Q": 3, "T": part.temperature, "sum_Q": sum(math.exp(-x / part.temperature) for x in a.values())}
    weights = part(scores, accuracy)
    for q, a_q in a.items():
        assert computed((line,), "u_q", values | {"a_q": a_q}) == pytest.approx(weights[q].item(), rel=1e-12)
    assert weights[2].item() == 1
    assert formula.note == "u_q = 1 for the questions outside Q."


def test_the_formula_of_batch_std_gives_its_values() -> None:
    scores = noise(0, 3, 4)
    first, second = formula_of(BatchStd(eps=0.3)).lines
    assert first == "A_i = (s_i − mean_G s) / (std s + ε)"
    assert second.startswith("std s = √( Σ (s − mean s)² / (n − 1) ),")
    by_hand = (scores - scores.mean(1, keepdim=True)) / (scores.flatten().std(correction=1) + 0.3)
    torch.testing.assert_close(BatchStd(eps=0.3)(scores), by_hand)


def test_the_formulas_of_reinforce_pp_give_its_values() -> None:
    scores, lengths = noise(0, 3, 4), torch.randint(1, 9, (3, 4), generator=torch.Generator().manual_seed(1))
    c = scores - scores.mean(1, keepdim=True)
    assert formula_of(ReinforcePlusPlus(eps=0.3)).lines == (
        "c_i = s_i − mean_G s",
        "A_i = c_i / (std c + ε)",
        "std c = √( Σ c² / (n − 1) ),  the step's n scores",
    )
    torch.testing.assert_close(ReinforcePlusPlus(eps=0.3)(scores), c / (((c**2).sum() / 11).sqrt() + 0.3))
    assert formula_of(ReinforcePlusPlus("tokens", eps=0.3)).lines == (
        "c_i = s_i − mean_G s",
        "A_i = (c_i − b) / (√v + ε)",
        "b = Σ_j |o_j| c_j / Σ_j |o_j|,  j: the step's completions",
        "v = Σ_j |o_j| (c_j − b)² / Σ_j |o_j|",
    )
    m = (lengths * c).sum() / lengths.sum()
    v = (lengths * (c - m) ** 2).sum() / lengths.sum()
    torch.testing.assert_close(ReinforcePlusPlus("tokens", eps=0.3)(scores, lengths), (c - m) / (v.sqrt() + 0.3))


PAIRWISE = [
    ("none", "all", "none", "none"),
    ("none", "top_entropy", "k3", "bonus"),
    ("token_truncate", "all", "k3", "none"),
    ("token_truncate", "all", "none", "bonus"),
    ("token_truncate", "top_entropy", "none", "none"),
]


@pytest.mark.parametrize(("correction", "tokens", "kl", "entropy"), PAIRWISE)
def test_the_loss_is_the_sum_of_the_printed_terms(correction: str, tokens: str, kl: str, entropy: str) -> None:
    choices = {"correction": correction, "tokens": tokens, "kl": kl, "entropy": entropy}
    overrides = [f"algorithm/{kind}={choice}" for kind, choice in choices.items()]
    overrides += ["algorithm.entropy.coefficient=0.3"] if entropy == "bonus" else []
    config = compose(overrides)
    run = build_run(config)
    algorithm = run.algorithm
    old, sampler, ref = -noise(0, 2, T).abs(), -noise(1, 2, T).abs(), -noise(2, 2, T).abs()
    new, H, A, mask = old + noise(3, 2, T), noise(4, 2, T).abs(), noise(5, 2), torch.ones(2, T).long()
    terms = {
        "ℓ_it": algorithm.objective(new, old, A, mask)[0],
        "ρ_it": algorithm.correction(old, sampler, mask).expand(2, T),
        "S_it": algorithm.tokens(H, mask).double() if tokens != "all" else None,
        "D_it": algorithm.kl(new, old, ref).expand(2, T),
        "H_it": H,
    }
    line = explanation(run, config, overrides).sections[-2].lines[0]
    inner = line.removeprefix("L(θ) = Σ_i w_i Σ_t ")
    assert inner != line
    w = 1 / (2 * T)  # of sequence_mean: two rows of T tokens
    total = 0.0
    for i, t in itertools.product(range(2), range(T)):
        values = {name: value[i, t].item() for name, value in terms.items() if value is not None}
        coefficients = {"β": algorithm.kl.beta, "λ": algorithm.entropy.coefficient}
        total += w * computed((f"term = {inner}",), "term", values | coefficients)
    loss, _ = algorithm.loss(new, old, A, mask, ref_logp=ref, rollout_logp=sampler, entropy=H)
    assert total == pytest.approx(loss.item(), rel=1e-12)
