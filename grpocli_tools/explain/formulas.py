"""The formulas of parts, which `grpocli explain` prints: those of formulas.yaml, and those that depend on keys."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, singledispatch
from importlib.resources import files
from itertools import pairwise
from typing import Any

from grpocli.algorithm.advantage import SCORE, DynamicSampling
from grpocli.algorithm.correction import AutoCorrection, Importance, NoCorrection, Preset
from grpocli.algorithm.kl import K1, K2, K3, KL, MAX_K3, Estimator, Reverse
from grpocli.algorithm.objective import Clip, Dppo
from grpocli.config import yaml_text
from grpocli.rewards.reward import Correctness


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


ZERO = "A_i = 0 for a completion without a score, and if all scores of the group are equal."
RATIO = "r_it = π_θ(o_it) / π_old(o_it)"
ESTIMATORS = "joschu.net/blog/kl-approx.html"
GEOMETRIC = "x_i is a geometric mean: TRL's and verl's sequence ratio is the product over the tokens."
CORRECTION_SOURCES = (
    "NeMo RL's GRPO guide",
    '"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (fengyao.notion.site, 2025)',
)
FILTERING = "overlong filtering: DAPO (arXiv 2503.14476), section 3.4"
TRUNCATED = "|o_i| = 0 for completions cut at the length limit: no loss"


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


@cache
def written_formulas() -> dict[str, dict[str, Any]]:
    text = files("grpocli_tools.explain").joinpath("formulas.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml_text.load(text)
    return found


def written_formula(name: str, owner: object) -> Formula:
    """The formula of formulas.yaml for the owner's values."""
    entry = dict(written_formulas()[name])
    for case in entry.pop("cases", ()):
        if all(getattr(owner, field) == value for field, value in case["when"].items()):
            entry |= case
    lines, source = tuple(entry.get("lines", ())), tuple(entry.get("source", ()))
    return Formula(lines, entry.get("symbols", {}), source, entry.get("note", ""))


@singledispatch
def formula_of(part: object) -> Formula:
    """The formula of a part, or the first line of its docstring if it has none here, as a part of a user."""
    cls = type(part)
    if cls.__module__.startswith("grpocli.") and cls.__name__ in written_formulas():
        return written_formula(cls.__name__, part)
    return Formula((summary(cls),))


@formula_of.register
def _clip(part: Clip) -> Formula:
    sequence = part.level == "sequence"
    r = "r_i" if sequence else "r_it"
    ratio = "r_i = ( Π_t π_θ(o_it) / π_old(o_it) )^(1 / |o_i|)" if sequence else RATIO
    bounded = r if part.delta is None else r.replace("r", "b")
    gain = f"min({bounded} A_i, clip({r}, 1 − ε_low, 1 + ε_high) A_i)"
    lines, symbols = [ratio], {"ε_low": "low", "ε_high": "high"}
    if part.delta is not None:
        lines.append(f"{bounded} = min({r}, δ)")
        symbols["δ"] = "delta"
    if part.dual is None:
        lines.append(f"ℓ_it = −{gain}")
    else:
        lines += [f"g_it = {gain}", "ℓ_it = −g_it where A_i ≥ 0,  −max(g_it, c A_i) where A_i < 0"]
        symbols["c"] = "dual"
    if part.drop_above is not None:
        lines.append("ℓ_it ← 0 where A_i < 0 and mean_t log(π_old / π_θ) > δ_off")
        symbols["δ_off"] = "drop_above"
    return Formula(tuple(lines), symbols, tuple(_clip_sources(part)))


def _clip_sources(part: Clip) -> Iterator[str]:
    yield "GRPO, DeepSeekMath (arXiv 2402.03300), equation 3"
    if part.high > part.low:
        yield "clip-higher: DAPO (arXiv 2503.14476), section 3.1"
    if part.level == "sequence":
        yield "sequence ratio: GSPO (arXiv 2507.18071), equation 7"
    if part.dual is not None:
        yield "dual clip: arXiv 1912.09729, section 4"
    if part.delta is not None:
        yield "two-sided clip: INTELLECT-2 (arXiv 2505.07291), section 3.4"
    if part.drop_above is not None:
        yield "off-policy sequence mask: DeepSeek-V3.2 (arXiv 2512.02556), equation 9"


@formula_of.register
def _dppo(part: Dppo) -> Formula:
    change = ["v_it = p_it − q_it"]
    if part.divergence == "kl":
        change = [
            "v_it = b_it where p_it > q_it, else −b_it",
            "b_it = q_it log(q_it / p_it) + u_it",
            "u_it = (1 − q_it) log((1 − q_it) / (1 − p_it))",
        ]
    lines = [
        RATIO,
        "p_it = π_θ(o_it);  q_it = π_old(o_it)",
        *change,
        "y_it = sign(A_i) v_it",
        "k_it = 0 where y_it > δ_i, else 1",
        "δ_i = δ_high where A_i > 0, else δ_low",
        f"ℓ_it = −k_it r_it A_i{' + η (log r_it)²' if part.drift else ''}",
    ]
    symbols = {"δ_low": "low", "δ_high": "high"} | ({"η": "drift"} if part.drift else {})
    source = [f"DPPO (arXiv 2602.04879), equation {13 if part.divergence == 'tv' else 14}"]
    if part.drift:
        source.append("drift: prime-rl's default loss; Kimi K2.5 (arXiv 2602.02276)")
    note = "k has no gradient. DPPO's π_old is the sampler: algorithm/correction=sampler."
    return Formula(tuple(lines), symbols, tuple(source), note)


@formula_of.register
def _importance(part: Importance) -> Formula:
    return _weight(part, {"x_low": "low", "x_high": "high"})


@formula_of.register
def _preset(part: Preset) -> Formula:
    return _weight(part.importance, {"ρ_min": "min", "ρ_max": "max"})


def _weight(part: Importance, kept: dict[str, str]) -> Formula:
    """The weight by x. kept: the symbols of the filter's bounds, with their keys."""
    levels = {part.weigh, part.drop}
    lines: list[str] = []
    symbols: dict[str, str] = {}
    weight = "1"
    if "token" in levels:
        lines.append("x_it = π_old(o_it) / μ(o_it)")
    if "sequence" in levels:
        lines.append("x_i = ( Π_t π_old(o_it) / μ(o_it) )^(1 / |o_i|)")
    if part.weigh != "none":
        weight = _ratio(part.weigh)
        if (part.min, part.max) != (0, math.inf):
            weight, symbols = f"clip({weight}, ρ_min, ρ_max)", {"ρ_min": "min", "ρ_max": "max"}
    if part.drop != "none":
        if "clip" in weight:  # both do not fit in one line
            lines.append(f"c_it = {weight}")
            weight = "c_it"
        low, high = kept
        weight = f"{weight} where {low} ≤ {_ratio(part.drop)} ≤ {high}, else 0"
        symbols |= kept
    note = "μ: as the sampler computes it; π_old: as the trainer does. ρ has no gradient."
    if "sequence" in levels:
        note = f"{note} {GEOMETRIC}"
    return Formula((*lines, f"ρ_it = {weight}"), symbols, CORRECTION_SOURCES, note)


def _ratio(level: str) -> str:
    return "x_i" if level == "sequence" else "x_it"


@formula_of.register
def _auto_correction(part: AutoCorrection) -> Formula:
    chosen, formula = part.chosen, formula_of(part.chosen)
    if isinstance(chosen, NoCorrection):
        return replace(formula, note=f"{formula.note}: rollout.max_staleness is 0")
    ratio, bounded = formula.lines
    bounded = bounded.replace("ρ_min", f"{chosen.min:g}").replace("ρ_max", f"{chosen.max:g}")
    note = f"token_truncate, for staleness. {formula.note}"
    return replace(formula, lines=(ratio, bounded), symbols={}, note=note)


KL_TERMS: dict[type[KL], tuple[tuple[str, ...], tuple[str, ...]]] = {
    Reverse: (
        (RATIO, "D_it = r_it sg[ log π_θ(o_it) − log π_ref(o_it) ]"),
        (
            "On-Policy Distillation (thinkingmachines.ai, 2025)",
            "MiniLLM (arXiv 2306.08543), GKD (arXiv 2306.13649): the reverse KL divergence on the student's samples",
        ),
    ),
    K1: (("−z_it",), (ESTIMATORS,)),
    K2: (("z_it² / 2",), (ESTIMATORS,)),
    K3: (
        ("d_it = exp(z_it) − z_it − 1", f"min(d_it, {MAX_K3:g})"),
        (
            "GRPO, DeepSeekMath (arXiv 2402.03300), equation 4",
            f"at most {MAX_K3:g}: NeMo RL (kl_output_clamp_value), verl (low_var_kl)",
        ),
    ),
}
"""The formulas of each KL term, the last of which is D_it or its estimate, and its sources."""


@formula_of.register
def _kl(part: KL) -> Formula:
    if not part.beta:
        return Formula(symbols={"β": "beta"}, note="β = 0, so no reference model is loaded")
    if type(part) not in KL_TERMS:  # of a user
        return Formula((summary(type(part)),))
    own, own_sources = KL_TERMS[type(part)]
    lines, symbols, sources = list(own), {"β": "beta"}, list(own_sources)
    if isinstance(part, Estimator):
        *before, estimate = own
        weighted = f"( π_θ(o_it) / π_old(o_it) ) ({estimate})" if part.on_policy else estimate
        lines = ["z_it = log π_ref(o_it) − log π_θ(o_it)", *before, f"D_it = {weighted}"]
    if part.sync_every:
        lines.append("after every m steps:  θ_ref ← α θ + (1 − α) θ_ref")
        symbols |= {"m": "sync_every", "α": "sync_alpha"}
        sources.append("reference sync: TR-DPO (arXiv 2404.09656)")
    if isinstance(part, Estimator) and part.on_policy:
        sources.append("importance weight: NeMo RL's GRPO guide")
    shown = [f"{name} for {task}" if task else name for task, name in part.models.items()]
    teachers = f"π_ref: {', '.join(shown)}." if shown else ""
    return Formula(tuple(lines), symbols, tuple(sources), teachers)


@formula_of.register
def _dynamic(part: DynamicSampling) -> Formula:
    score = "s" if part.reward == SCORE else "R_d"
    then = {"train_partial": "train on fewer", "error": "stop the run"}[part.on_exhausted]
    surplus = {"discard": "discarded", "carry": "carried into the next step, π_old = μ"}[part.surplus]
    lines = [
        f"keep a question where min_G {score} < max_G {score}",
        f"sample until P are kept; after n_max rounds {then}",
        f"questions beyond P: {surplus}",
    ]
    sources = ["DAPO (arXiv 2503.14476), section 3.2, equation 11"]
    if part.mask_truncated:
        lines.append(TRUNCATED)
        sources.append(FILTERING)
    symbols = {"n_max": "max_rounds"} | ({} if part.reward == SCORE else {"R_d": "reward"})
    return Formula(tuple(lines), symbols, tuple(sources))


@formula_of.register
def _correctness(part: Correctness) -> Formula:
    return Formula((summary(type(part)),), {"right": "right", "wrong": "wrong"})
