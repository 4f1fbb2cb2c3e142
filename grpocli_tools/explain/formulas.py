"""The formulas of parts, which `grpocli explain` prints. Law tests compare their values with the code's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch

from grpocli.algorithm.advantage import (
    BatchStd,
    Center,
    LeaveOneOut,
    Mad,
    MaxRL,
    NoAdvantage,
    ReinforcePlusPlus,
    Std,
    Supervised,
)
from grpocli.algorithm.aggregate import Constant, SequenceMean, TokenMean
from grpocli.algorithm.correction import AutoCorrection, Correction, NoCorrection, Range, SamplerAsOld, TokenMask
from grpocli.algorithm.entropy import EntropyBonus, NoEntropy
from grpocli.algorithm.keep import SCORE, All, Dynamic
from grpocli.algorithm.kl import K1, K2, K3, KL, MAX_K3, Estimator, NoKL, Reverse
from grpocli.algorithm.objective import Cispo, Clip, Dppo, Geometric, Mirror, Sapo
from grpocli.algorithm.question_weight import Difficulty, Uniform
from grpocli.algorithm.tokens import AllTokens, TopEntropy
from grpocli.rewards.length import KimiLength, Length, LengthPenalty, Overlong
from grpocli.rewards.reward import Correctness, NoReward
from grpocli_tools.explain.documentation import summary

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


FIXED: dict[type, Formula] = {
    Std: Formula(
        ("A_i = (s_i − mean_G s) / (std_G s + ε)", "std_G s = √( Σ_G (s − mean_G s)² / (n − 1) ),  n scores"),
        {"ε": "eps"},
        ("GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2",),
        ZERO,
    ),
    Center: Formula(("A_i = s_i − mean_G s",), source=("Dr. GRPO (arXiv 2503.20783), section 3.2",), note=ZERO),
    Mad: Formula(
        ("A_i = (s_i − mean_G s) / (MAD_G s + ε)", "MAD_G s = mean_G |s − mean_G s|"),
        {"ε": "eps"},
        ("DGPO's DGAE, MathForge (arXiv 2601.20614)",),
        ZERO,
    ),
    BatchStd: Formula(
        ("A_i = (s_i − mean_G s) / (std s + ε)", "std s = √( Σ (s − mean s)² / (n − 1) ),  the step's n scores"),
        {"ε": "eps"},
        ('"Tricks or Traps?" (arXiv 2508.08221)',),
        ZERO,
    ),
    MaxRL: Formula(("A_i = (s_i − mean_G s) / mean_G s",), source=("MaxRL (arXiv 2602.02710)",), note=ZERO),
    NoAdvantage: Formula(
        ("A_i = 0",),
        source=("distillation without a reward: GKD (arXiv 2306.13649)",),
        note="Scores are reported and have no gradient.",
    ),
    Supervised: Formula(
        ("A_i = 1",), source=("maximum likelihood",), note="o_i is the answer of the data, not a sample of π_old."
    ),
    Uniform: Formula(note="every question weighs 1"),
    Difficulty: Formula(
        (
            "A_i ← u_q A_i",
            "u_q = |Q| exp(−a_q / T) / Σ_p∈Q exp(−a_p / T),  q ∈ Q",
            "Q: the step's questions whose scores s are not all equal",
            "a_q = mean_G R_a;  1 where that is 0 or no R_a applies",
        ),
        {"T": "temperature", "R_a": "reward"},
        ("DGPO's DQW, MathForge (arXiv 2601.20614)",),
        "u_q = 1 for the questions outside Q.",
    ),
    Sapo: Formula(
        (
            RATIO,
            "ℓ_it = −(4 / τ) σ(τ (r_it − 1)) A_i",
            "τ = τ_pos where A_i > 0, else τ_neg",
        ),
        {"τ_pos": "tau_positive", "τ_neg": "tau_negative"},
        ("SAPO (arXiv 2511.20347)",),
        "σ(x) = 1 / (1 + exp(−x))",
    ),
    Geometric: Formula(
        (
            RATIO,
            "y_it = sign(A_i) min( sign(A_i) log r_it, ε_i )",
            "ε_i = ε_high where A_i > 0, else ε_low",
            "ℓ_it = −A_i exp( Σ_t y_it / |o_i| )",
        ),
        {"ε_low": "low", "ε_high": "high"},
        ("GMPO (arXiv 2507.20673), equation 4",),
    ),
    AllTokens: Formula(note="every token of the loss has its policy-gradient term"),
    TopEntropy: Formula(
        (
            "S_it = 1 where H_it ≥ h, else 0",
            "h: the (1 − κ) quantile of H over the tokens of the update",
            "H_it: entropy of π(· | q, o_i,<t) before the step, in nats",
        ),
        {"κ": "quantile"},
        ('"Beyond the 80/20 Rule" (arXiv 2506.01939), equation 6',),
    ),
    NoCorrection: Formula(note="every token weighs 1"),
    SamplerAsOld: Formula(
        ("π_old(o_it) = μ(o_it)",),
        {},
        ("default of prime-rl; verl: rollout_correction.bypass_mode",),
        "μ: as the sampler computes it. Every token weighs 1.",
    ),
    NoKL: Formula(note="no reference model is loaded"),
    NoEntropy: Formula(note="no bonus"),
    SequenceMean: Formula(("w_i = 1 / (N |o_i|)",), source=("GRPO, DeepSeekMath (arXiv 2402.03300), equation 3",)),
    Constant: Formula(("w_i = 1 / (N L)",), {"L": "length"}, ("Dr. GRPO (arXiv 2503.20783), section 3.1",)),
    Length: Formula(
        ("a wanted length", "R_length = max(0, 1 − |l_i − l| / w)", "l_i: o_i's tokens"),
        {"l": "target", "w": "width"},
    ),
    Overlong: Formula(
        (
            "soft punishment of long completions",
            "R_overlong = min(0, max(−1, (l_max − l_buf − l_i) / l_buf))",
            "l_i: o_i's tokens;  l_buf null: max(1, ⌊l_max / 5⌋)",
        ),
        {"l_max": "max_tokens", "l_buf": "buffer_tokens"},
        ("DAPO (arXiv 2503.14476), equation 13",),
    ),
    KimiLength: Formula(
        (
            "Kimi's length reward",
            "λ_i = 0.5 − (l_i − min_G l) / (max_G l − min_G l)",
            "R_kimi_length = λ_i for a right answer, min(0, λ_i) for a wrong one;  0 if max_G l = min_G l",
            "l_i: o_i's tokens",
        ),
        {},
        ("Kimi k1.5 (arXiv 2501.12599), section 2.3.3",),
    ),
    NoReward: Formula(note="no score"),
}
"""The formulas of parts that are the same with all values of their keys."""


@singledispatch
def formula_of(part: object) -> Formula:
    """The formula of a part, or the first line of its docstring if it has none here, as a part of a user."""
    return FIXED.get(type(part)) or Formula((summary(type(part)),))


@formula_of.register
def _leave_one_out(part: LeaveOneOut) -> Formula:
    lines = ["A_i = s_i − Σ_G,j≠i s_j / (n − 1),  n scores", "    = (s_i − mean_G s) n / (n − 1)"]
    sources = ["RLOO (arXiv 2402.14740), equation 9"]
    if part.scale == "others":
        lines.append("A_i ← A_i / (std_G,j≠i s + 10⁻⁶) where that std is not 0")
        sources.append("scaled: NeMo RL (normalize_rewards, use_leave_one_out_baseline)")
    return Formula(tuple(lines), source=tuple(sources), note=ZERO)


@formula_of.register
def _reinforce_plus_plus(part: ReinforcePlusPlus) -> Formula:
    sources = ("REINFORCE++-baseline (arXiv 2501.03262)",)
    if part.over == "samples":
        scaled = ("A_i = c_i / (std c + ε)", "std c = √( Σ c² / (n − 1) ),  the step's n scores")
        return Formula(("c_i = s_i − mean_G s", *scaled), {"ε": "eps"}, sources, ZERO)
    lines = (
        "c_i = s_i − mean_G s",
        "A_i = (c_i − b) / (√v + ε)",
        "b = Σ_j |o_j| c_j / Σ_j |o_j|,  j: the step's completions",
        "v = Σ_j |o_j| (c_j − b)² / Σ_j |o_j|",
    )
    note = "A_i = 0 for a completion without a score. Where all scores of a group are equal, c_i = 0, but not A_i."
    return Formula(lines, {"ε": "eps"}, sources, note)


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
def _cispo(part: Cispo) -> Formula:
    lines, symbols = ["ℓ_it = −sg[ min(r_it, 1 + ε_high) ] A_i log π_θ(o_it)"], {"ε_high": "high"}
    if part.low is not None:
        lines = ["b_it = clip(r_it, 1 − ε_low, 1 + ε_high)", "ℓ_it = −sg[ b_it ] A_i log π_θ(o_it)"]
        symbols = {"ε_low": "low"} | symbols
    return Formula(
        (RATIO, *lines),
        symbols,
        ("CISPO, MiniMax-M1 (arXiv 2506.13585), equation 4",),
        "sg[ ]: a constant, without gradient.",
    )


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
def _mirror(part: Mirror) -> Formula:
    if not part.tau:
        return Formula(
            ("ℓ_it = −A_i log π_θ(o_it)",), {"τ": "tau"}, ("REINFORCE",), "τ = 0: the plain policy gradient."
        )
    return Formula(
        (RATIO, "ℓ_it = −A_i log π_θ(o_it) + (τ / 2) (log r_it)²"),
        {"τ": "tau"},
        ("mirror descent: Kimi k1.5 (arXiv 2501.12599), equation 3", "DRO (arXiv 2405.19107)"),
    )


@formula_of.register
def _correction(part: Correction) -> Formula:
    weigh, drop = part.weighing, part.dropping
    levels = {weigh.level, drop.level}
    lines: list[str] = []
    symbols: dict[str, str] = {}
    weight = "1"
    if "token" in levels:
        lines.append("x_it = π_old(o_it) / μ(o_it)")
    if "sequence" in levels:
        lines.append("x_i = ( Π_t π_old(o_it) / μ(o_it) )^(1 / |o_i|)")
    if weigh.level != "none":
        weight = _symbol(weigh)
        if (weigh.low, weigh.high) != (0, math.inf):
            weight, symbols = f"clip({_symbol(weigh)}, ρ_min, ρ_max)", {"ρ_min": "min", "ρ_max": "max"}
    if drop.level != "none":
        if "clip" in weight:  # both do not fit in one line
            lines.append(f"c_it = {weight}")
            weight = "c_it"
        kept = {"x_low": "low", "x_high": "high"}
        if isinstance(part, TokenMask):
            kept = {"ρ_min": "min", "ρ_max": "max"}
        low, high = kept
        weight = f"{weight} where {low} ≤ {_symbol(drop)} ≤ {high}, else 0"
        symbols |= kept
    note = "μ: as the sampler computes it; π_old: as the trainer does. ρ has no gradient."
    if "sequence" in levels:
        note = f"{note} {GEOMETRIC}"
    return Formula((*lines, f"ρ_it = {weight}"), symbols, CORRECTION_SOURCES, note)


def _symbol(of: Range) -> str:
    return "x_i" if of.level == "sequence" else "x_it"


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
    shown = [f"{name} for {task}" if task else name for task, name in {**part.models, **part.urls}.items()]
    teachers = f"π_ref: {', '.join(shown)}." if shown else ""
    return Formula(tuple(lines), symbols, tuple(sources), " ".join(filter(None, (teachers, part.warning))))


@formula_of.register
def _entropy_bonus(part: EntropyBonus) -> Formula:
    if not part.coefficient:
        return Formula(symbols={"λ": "coefficient"}, note="λ = 0, so there is no bonus")
    return Formula(
        ("H_it = −Σ_v π_θ(v | q, o_i,<t) log π_θ(v | q, o_i,<t)",),
        {"λ": "coefficient"},
        ("A3C (arXiv 1602.01783)",),
        "In nats, with gradient, of the distribution that is sampled from.",
    )


@formula_of.register
def _token_mean(part: TokenMean) -> Formula:
    weights = {
        "batch": ("w_i = 1 / Σ_j∈U |o_j|", "U: the completions of the update"),
        "group": ("w_i = 1 / (K Σ_G |o_j|)", "K: the number of questions in the update"),
        "micro_batch": ("w_i = 1 / (B Σ_j∈U |o_j|)", "U: those of o_i's micro-batch, one of the update's B"),
    }
    scopes = {
        "batch": "token mean: DAPO (arXiv 2503.14476), section 3.3, over the whole update",
        "group": "DAPO (arXiv 2503.14476), equation 8",
        "micro_batch": "trainers that average over micro-batches; it depends on the split",
    }
    lines, sources = [*weights[part.scope]], [scopes[part.scope]]
    if part.informative_only:
        what = "K: only" if part.scope == "group" else "U: only of"
        lines.append(f"{what} questions where some A_j ≠ 0;  else w_i = 0")
        sources.append("informative only: DGPO, MathForge (arXiv 2601.20614)")
    return Formula(tuple(lines), source=tuple(sources))


@formula_of.register
def _all(part: All) -> Formula:
    note = "every question is trained on"
    return Formula((TRUNCATED,), source=(FILTERING,), note=note) if part.mask_truncated else Formula(note=note)


@formula_of.register
def _dynamic(part: Dynamic) -> Formula:
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
def _length_penalty(part: LengthPenalty) -> Formula:
    whom = "; 0 for a wrong answer" if part.only_right else ""
    return Formula(
        (
            "a length penalty tied to the pass rate",
            f"R_length_penalty = −p l_i / max_G l{whom}",
            "l_i: o_i's tokens;  p: the share of the group's answers that are right",
        ),
        {},
        ("prime-rl, LinearLengthPenaltyConfig: its term of output tokens, whose p is the mean reward",),
    )


@formula_of.register
def _correctness(part: Correctness) -> Formula:
    return Formula((summary(type(part)),), {"right": "right", "wrong": "wrong"})
