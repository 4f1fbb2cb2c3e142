"""The objective of a run as formulas, in the order of the computation, and the comparison of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpocli.algorithm import Algorithm
from grpocli.algorithm.algorithm import PARTS
from grpocli.config.schema import Rollouts, Run
from grpocli.config.user_code import choice_of
from grpocli.config.yaml_text import flat
from grpocli.runs.sessions import as_typed
from grpocli.text import counted
from grpocli_tools.explain.formulas import Formula, field_docs, formula_of, settings, written_formula

ORDER = (
    *("sampling", "score", "keep", "advantage", "combine", "question_weight", "bounds", "objective", "tokens"),
    *("correction", "kl", "entropy", "aggregate", "routers", "loss", "update"),
)
"""The sections, in the order of the computation."""
COMPARED = ("algorithm", "reward", "rollout", "train")

UNSCORED = "A reward that does not apply to o_i is left out; if none applies, o_i has no score."
LOSS_NOTE = "Minimised. i: the N completions of an update. t: the |o_i| tokens of o_i in the loss."
ABSENT = "–"
"""Shown if one of two configs lacks the formula or key."""
CUTS = ("min_p", "top_k", "top_p")  # in the order that the sampler applies them


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of a formula, with the config key that holds its value."""

    name: str
    key: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """One step of the computation: its name, its choice and its formulas.

    settings: the part's fields that are not symbols, by key.
    """

    label: str
    choice: str
    lines: tuple[str, ...]
    note: str = ""
    symbols: tuple[Symbol, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    source: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """An objective. title: the overrides. unused: parts without an effect. values: all keys that are compared."""

    title: str
    sections: tuple[Section, ...]
    unused: tuple[Section, ...]
    values: dict[str, str]

    @property
    def symbols(self) -> list[Symbol]:
        return [symbol for section in (*self.sections, *self.unused) for symbol in section.symbols]

    @property
    def settings(self) -> list[tuple[str, str]]:
        return [pair for section in (*self.sections, *self.unused) for pair in section.settings]


def explanation(run: Run, config: DictConfig, overrides: list[str]) -> Explanation:
    """The objective of a run, in the order of the computation."""
    algorithm: Algorithm = run.algorithm
    parts = {kind: part_section(f"algorithm/{kind}", getattr(algorithm, kind)) for kind in PARTS}
    used = {kind: section for kind, section in parts.items() if is_used(algorithm, kind, section)}
    terms = {kind: one for kind, one in used.items() if kind != "correction" or not algorithm.takes_sampler_as_old}
    loss = f"{loss_line(terms)}{' + χ B' * bool(algorithm.router_aux_loss_coef)}"
    sections = [
        *(
            (_step("sampling", "answers", run.rollout, "rollout"),)
            if algorithm.supervised
            else (_sampling(run.rollout), _score(run))
        ),
        *(_named(section, run) if kind in ("keep", "question_weight") else section for kind, section in used.items()),
        *_between_parts(algorithm),
        Section("loss", "", (loss,), LOSS_NOTE),
        _update(run),
    ]
    unused = tuple(section for kind, section in parts.items() if kind not in used)
    ordered = tuple(sorted(sections, key=lambda section: ORDER.index(section.label)))
    return Explanation(" ".join(overrides), ordered, unused, _values(run, config))


def part_section(group: str, part: object) -> Section:
    """The formulas of one part, with keys and values from the live object."""
    formula = formula_of(part)
    label = group.rpartition("/")[2]
    return _section(label, choice_of(group, part), formula, part, group.replace("/", "."))


def is_used(algorithm: Algorithm, kind: str, section: Section) -> bool:
    """Whether a part has an effect; optional terms are decided as in `Algorithm.loss`."""
    enabled = {
        "kl": algorithm.needs_reference,
        "entropy": algorithm.needs_entropy_gradient,
        "tokens": algorithm.tokens.needs_entropy,
    }
    return bool(enabled.get(kind, bool(section.lines)))


def loss_line(used: dict[str, Section]) -> str:
    factors = [sign for kind, sign in (("correction", "ρ_it"), ("tokens", "S_it")) if kind in used]
    terms = " ".join([*factors, "ℓ_it"])
    added = [term for kind, term in (("kl", "+ β D_it"), ("entropy", "− λ H_it")) if kind in used]
    inner = f"( {' '.join([terms, *added])} )" if added else terms
    return f"L(θ) = Σ_i w_i Σ_t {inner}"


def _section(label: str, choice: str, formula: Formula, owner: object, prefix: str) -> Section:
    values, described = settings(owner), field_docs(type(owner))
    symbols = tuple(
        Symbol(
            name, f"{prefix}.{field}", as_typed(values[field]), described.get(field, "").partition(". ")[0].rstrip(".")
        )
        for name, field in formula.symbols.items()
    )
    rest = tuple((f"{prefix}.{f}", as_typed(v)) for f, v in values.items() if f not in formula.symbols.values())
    return Section(label, choice, formula.lines, formula.note, symbols, rest, formula.source)


def _step(label: str, name: str, owner: object, prefix: str, choice: str = "") -> Section:
    """A step of the computation that belongs to no part, by its name in formulas.yaml."""
    return replace(_section(label, choice, written_formula(name, owner), owner, prefix), settings=())


def _between_parts(algorithm: Algorithm) -> Iterator[Section]:
    """The steps beside the parts that the algorithm has."""
    if algorithm.combine != "sum":
        combined = _step("combine", "combine", algorithm, "algorithm", algorithm.combine)
        yield replace(combined, settings=(("algorithm.combine", algorithm.combine),))
    if (algorithm.advantage_min, algorithm.advantage_max) != (None, None):
        yield _step("bounds", "bounds", algorithm, "algorithm")
    if algorithm.router_aux_loss_coef:
        yield _step("routers", "routers", algorithm, "algorithm")


def _sampling(rollout: Rollouts) -> Section:
    cuts = [f for f in CUTS if getattr(rollout, f) != getattr(Rollouts(), f)]
    cut = f", cut to {', '.join(cuts)}" if cuts else ""
    penalised, structure = rollout.repetition_penalty != 1, rollout.sampling.structure
    symbols = {"P": "prompts_per_step", "G": "group_size", "T_s": "temperature"} | {f: f for f in cuts}
    lines = (
        "o_1 … o_G ~ μ(· | q) for each of P questions q",
        f"μ (sampler), π_θ, π_old, π_ref = softmax(logits / T_s){cut}",
        *(("logits z of tokens in q or earlier in o_i: z / ν where z > 0, else ν z",) if penalised else ()),
        *((f"μ: only tokens that keep o_i within rollout.{structure}",) if structure else ()),
        "π(o_it): probability of o_i's token t given q and o_i,<t",
    )
    formula = Formula(lines, symbols | ({"ν": "repetition_penalty"} if penalised else {}))
    settings = tuple((f"rollout.{f}", as_typed(getattr(rollout, f))) for f in CUTS if f not in cuts)
    return replace(_section("sampling", "", formula, rollout, "rollout"), settings=settings)


def _score(run: Run) -> Section:
    if not run.reward:
        return Section("score", "none", (), "reward=none: completions have no score.")
    rewards = [_reward(k, name, reward) for k, (name, reward) in enumerate(run.reward.items(), 1)]
    terms = [f"ω_{k} R_{k}(o_i)" for k in range(1, len(rewards) + 1)]
    total = " + ".join(terms) if len(terms) <= 3 else "Σ_k ω_k R_k(o_i)"
    return Section(
        "score",
        "",
        (f"s_i = {total}", *(line for r in rewards for line in r.lines)),
        UNSCORED,
        tuple(symbol for r in rewards for symbol in r.symbols),
        tuple(pair for r in rewards for pair in r.settings),
        tuple(source for r in rewards for source in r.source),
    )


def _reward(k: int, name: str, reward: Any) -> Section:
    """The formulas of the k-th reward, and its weight."""
    prefix = f"reward.{name}"
    own = _section("", name, formula_of(reward), reward, prefix)
    weight = Symbol(f"ω_{k}", f"{prefix}.weight", as_typed(reward.weight), f"Weight of R_{k}")
    first, *more = own.lines or (own.note,)
    return replace(
        own,
        lines=(f"R_{k}: {name}. {first}", *more),
        symbols=(weight, *(symbol for symbol in own.symbols if symbol.key != weight.key)),
        settings=tuple(pair for pair in own.settings if pair[0] != weight.key),
    )


def _named(section: Section, run: Run) -> Section:
    """The section with the accuracy reward of each task, if the config names none."""
    from grpocli.tasks.prompt_source import accuracy_rewards_of

    accuracy_rewards = accuracy_rewards_of(run)
    names = dict.fromkeys(accuracy_rewards.values())
    each = ", ".join(f"{accuracy_reward} ({task})" for task, accuracy_reward in accuracy_rewards.items())
    meaning = f"The accuracy; null is {next(iter(names)) if len(names) == 1 else each}"
    symbols = (replace(s, meaning=meaning) if s.value == "null" else s for s in section.symbols)
    return replace(section, symbols=tuple(symbols))


def _update(run: Run) -> Section:
    train, rollout = run.train, run.rollout
    rows = rollout.prompts_per_step * rollout.group_size
    updates = train.updates_per_step
    several = updates > 1
    older = run.algorithm.keep.surplus == "carry" or rollout.max_staleness > 0
    sampler_is_old = run.algorithm.takes_sampler_as_old
    mixed = older and not (run.algorithm.has_correction or sampler_is_old)
    even = rows % train.minibatches == 0
    share = f"= {rows // train.minibatches:,}" if even else f"≈ {rows / train.minibatches:,.0f}"
    old = "π_old: π_θ before the step's first update" if several else "π_old = sg[π_θ]: with one update per step, r = 1"
    lines = (
        f"E M = {counted(updates, 'update')} per step, of N = P G / M {share} completions",
        *(() if sampler_is_old else (old,)),
        *((f"μ: π_θ of up to {counted(rollout.max_staleness, 'step')} earlier",) if rollout.max_staleness else ()),
        *(("π_old = μ for completions of older weights",) if mixed else ()),
    )
    formula = Formula(lines, {"E": "epochs", "M": "minibatches"})
    return replace(_section("update", "", formula, train, "train"), settings=())


def _values(run: Run, config: DictConfig) -> dict[str, str]:
    """Every key that shapes the objective, and the choices of parts, in the config's order."""
    found = {f"algorithm/{kind}": choice_of(f"algorithm/{kind}", getattr(run.algorithm, kind)) for kind in PARTS}
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    for name in COMPARED:
        found |= {key: as_typed(value) for key, value in flat(plain[name], name).items()}
    return found


@dataclass(frozen=True, slots=True)
class Pair:
    """A step of the computation that differs between two sides; None where a side lacks it."""

    label: str
    left: Section | None
    right: Section | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two objectives.

    titles: both command lines. sections: the steps that differ. keys: [key, left, right] where values differ.
    """

    titles: tuple[str, str]
    sections: tuple[Pair, ...]
    keys: list[list[str]]

    @property
    def same(self) -> bool:
        return not self.sections and not self.keys

    @property
    def verdict(self) -> str:
        """A sentence for equal objectives and for equal formulas."""
        if self.same:
            return "the same objective"
        return "" if self.sections else "the same formulas; these values differ"


def compared(left: Explanation, right: Explanation) -> Comparison:
    """The steps whose formulas differ and the keys whose values differ, in the order of the computation."""
    keys = [
        [key, left.values.get(key, ABSENT), right.values.get(key, ABSENT)]
        for key in dict.fromkeys((*left.values, *right.values))
        if left.values.get(key) != right.values.get(key)
    ]
    titles = (f"left   {left.title or '(the defaults)'}", f"right  {right.title or '(the defaults)'}")
    # the note of an unused part stands in for its formulas
    mine, theirs = ({s.label: s for s in (*side.sections, *side.unused)} for side in (left, right))
    pairs = [Pair(label, mine.get(label), theirs.get(label)) for label in ORDER]
    return Comparison(titles, tuple(one for one in pairs if formulas(one.left) != formulas(one.right)), keys)


def formulas(section: Section | None) -> tuple[str, ...]:
    """A section's formulas and note; nothing without a section."""
    return (*section.lines, section.note) if section else ()
