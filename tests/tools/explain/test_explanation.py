"""The explanation of a run, and the comparison of two."""

from __future__ import annotations

import functools

import pytest
from omegaconf import DictConfig, OmegaConf

from grpocli.composition.compose import build_run, compose
from grpocli.runs.sessions import as_typed
from grpocli_tools.explain.explanation import ORDER, Explanation, compared, explanation
from grpocli_tools.explain.render import comparison_markdown, comparison_text, pair_lines

CASES = [
    [],
    ["algorithm=dapo", "reward=[math,format]", "algorithm.keep.reward=math"],
    ["algorithm=drgrpo", "algorithm.objective.dual=3", "algorithm/tokens=top_entropy", "algorithm/entropy=bonus"],
    ["algorithm=dgpo", "algorithm/correction=sequence_mask", "rollout.top_p=0.9", "algorithm/kl=k1"],
    [
        "algorithm.combine=normalize_then_sum",
        "algorithm.router_aux_loss_coef=0.01",
        "algorithm.kl.sync_every=4",
        "train.epochs=2",
        "train.minibatches=3",
    ],
]


@functools.cache
def explained_config(*overrides: str) -> tuple[DictConfig, Explanation]:
    """A cache, because composing takes a quarter of a second and the configs are only read."""
    config = compose(list(overrides))
    return config, explanation(build_run(config), config, list(overrides))


def explained(*overrides: str) -> Explanation:
    return explained_config(*overrides)[1]


def section(shown: Explanation, label: str) -> list[str]:
    return [line for s in shown.sections if s.label == label for line in s.lines]


NOT_EXPLAINED = {
    "algorithm.combine",
    "algorithm.advantage_min",
    "algorithm.advantage_max",
    "algorithm.router_aux_loss_coef",
}
"""Keys that are explained only with another value than the default."""


@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_every_key_of_the_algorithm_is_explained_with_the_value_of_the_config(overrides: list[str]) -> None:
    config, shown = explained_config(*overrides)
    pairs = [(s.key, s.value) for s in shown.symbols] + shown.settings
    for key, value in pairs:
        assert value == as_typed(OmegaConf.select(config, key, throw_on_missing=True)), key
    said, names = {key for key, _ in pairs}, [s.name for s in shown.symbols]
    assert (len(said), len(set(names))) == (len(pairs), len(names)), "a key is shown once, a symbol has one meaning"
    assert all(s.meaning for s in shown.symbols)
    keys = {key for key in shown.values if key.startswith("algorithm.") and key not in NOT_EXPLAINED}
    assert keys <= said
    assert len(keys) > 5
    labels = [s.label for s in shown.sections]
    assert labels == [label for label in ORDER if label in labels], "in the order of the computation"
    assert {"score", "advantage", "objective", "aggregate", "loss"} <= set(labels)


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        ([], "L(θ) = Σ_i w_i Σ_t ( ℓ_it + β D_it )"),
        (["algorithm.kl.beta=0"], "L(θ) = Σ_i w_i Σ_t ℓ_it"),
        (["algorithm=dapo", "algorithm/correction=token_mask"], "L(θ) = Σ_i w_i Σ_t ρ_it ℓ_it"),
        (["algorithm=dapo", "algorithm/correction=sampler"], "L(θ) = Σ_i w_i Σ_t ℓ_it"),
        (["algorithm=dapo", "algorithm.router_aux_loss_coef=0.001"], "L(θ) = Σ_i w_i Σ_t ℓ_it + χ B"),
        (["algorithm/tokens=top_entropy"], "L(θ) = Σ_i w_i Σ_t ( S_it ℓ_it + β D_it )"),
        (["algorithm=dgpo", "algorithm/entropy=bonus"], "L(θ) = Σ_i w_i Σ_t ( ℓ_it − λ H_it )"),
        (["algorithm=dgpo", "algorithm/entropy=bonus", "algorithm.entropy.coefficient=0"], "L(θ) = Σ_i w_i Σ_t ℓ_it"),
    ],
)
def test_the_loss_has_the_terms_in_use(overrides: list[str], loss: str) -> None:
    assert section(explained(*overrides), "loss") == [loss]


AHEAD = ["engine=vllm", "rollout.max_staleness=2"]
STRUCTURED = [
    "engine=vllm",
    "algorithm/correction=token_truncate",
    "rollout.regex=a+",
    "rollout.repetition_penalty=1.2",
]
# overrides: a section, and lines in it
LINES: list[tuple[list[str], str, list[str]]] = [
    (["reward=[math,format]"], "score", ["s_i = ω_1 R_1(o_i) + ω_2 R_2(o_i)"]),
    (["algorithm=dapo", "algorithm.keep.reward=score"], "keep", ["keep a question where min_G s < max_G s"]),
    ([], "update", ["E M = 1 update per step, of N = P G / M = 256 completions"]),
    ([], "update", ["π_old = sg[π_θ]: with one update per step, r = 1"]),
    (
        ["train.epochs=2", "train.minibatches=3"],
        "update",
        ["E M = 6 updates per step, of N = P G / M ≈ 85 completions", "π_old: π_θ before the step's first update"],
    ),
    (
        ["rollout.top_p=0.9", "rollout.top_k=5"],
        "sampling",
        ["μ (sampler), π_θ, π_old, π_ref = softmax(logits / T_s), cut to top_k, top_p"],
    ),
    (STRUCTURED, "sampling", ["logits z of tokens in q or earlier in o_i: z / ν where z > 0, else ν z"]),
    (STRUCTURED, "sampling", ["μ: only tokens that keep o_i within rollout.regex"]),
    (["algorithm=sft"], "sampling", ["o_1: the answer of the data to each of P questions q,  G = 1"]),
    (AHEAD, "loss", ["L(θ) = Σ_i w_i Σ_t ( ρ_it ℓ_it + β D_it )"]),
    (AHEAD, "correction", ["ρ_it = clip(x_it, 0, 2)"]),
    (AHEAD, "update", ["μ: π_θ of up to 2 steps earlier"]),
    ([*AHEAD, "algorithm/correction=none"], "update", ["π_old = μ for completions of older weights"]),
    (["algorithm=dapo", "algorithm.keep.surplus=carry"], "update", ["π_old = μ for completions of older weights"]),
]


@pytest.mark.parametrize(("overrides", "label", "lines"), LINES, ids=str)
def test_a_section_has_what_the_config_changes(overrides: list[str], label: str, lines: list[str]) -> None:
    assert set(lines) <= set(section(explained(*overrides), label))


@pytest.mark.parametrize(
    ("overrides", "verdict", "keys"),
    [
        (["algorithm.objective.low=0.1"], "the same formulas; these values differ", ["algorithm.objective.low"]),
        (["optim.lr=1", "algorithm=grpo", "seed=3"], "the same objective", []),
    ],
)
def test_equal_formulas_are_said_to_be(overrides: list[str], verdict: str, keys: list[str]) -> None:
    found = compared(explained(), explained(*overrides))
    assert (found.sections, [key for key, _, _ in found.keys]) == ((), keys)
    assert verdict in comparison_text(found)
    assert verdict[1:] in comparison_markdown(found)


def test_a_comparison_shows_only_differences() -> None:
    found = compared(explained("algorithm=drgrpo"), explained("algorithm=drgrpo", "algorithm/advantage=mad"))
    assert [pair.label for pair in found.sections] == ["advantage"]
    assert list(pair_lines(found.sections[0])) == [
        "advantage",
        "  left             A_i = s_i − mean_G s",
        "  right            A_i = (s_i − mean_G s) / (MAD_G s + ε)",
        "                   MAD_G s = mean_G |s − mean_G s|",
    ]
    assert found.keys == [["algorithm/advantage", "center", "mad"], ["algorithm.advantage.eps", "–", "0.0001"]]
