"""The explanation of a run, and the comparison of two."""

from __future__ import annotations

import functools

import pytest
from omegaconf import DictConfig, OmegaConf

from grpocli.composition.compose import build_run, compose
from grpocli.runs.sessions import as_typed
from grpocli_tools.explain.explanation import ORDER, Explanation, compared, explanation
from grpocli_tools.explain.render import (
    comparison_markdown,
    comparison_text,
    explanation_markdown,
    explanation_text,
    pair_lines,
)

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


@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_symbols_have_keys_and_values_of_the_config(overrides: list[str]) -> None:
    config, shown = explained_config(*overrides)
    pairs = [(s.key, s.value) for s in shown.symbols] + shown.settings
    for key, value in pairs:
        assert value == as_typed(OmegaConf.select(config, key, throw_on_missing=True)), key
    assert len({key for key, _ in pairs}) == len(pairs)
    names = [s.name for s in shown.symbols]
    assert len(set(names)) == len(names), "a symbol has one meaning"
    assert all(s.meaning for s in shown.symbols)


NOT_EXPLAINED = {
    "algorithm.combine",
    "algorithm.advantage_min",
    "algorithm.advantage_max",
    "algorithm.router_aux_loss_coef",
}
"""Keys that are explained only with another value than the default."""


@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_every_key_of_the_algorithm_is_explained(overrides: list[str]) -> None:
    shown = explained(*overrides)
    said = {s.key for s in shown.symbols} | {key for key, _ in shown.settings}
    keys = {key for key in shown.values if key.startswith("algorithm.") and key not in NOT_EXPLAINED}
    assert keys <= said
    assert len(keys) > 5


@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_sections_come_in_the_order_of_the_computation(overrides: list[str]) -> None:
    labels = [s.label for s in explained(*overrides).sections]
    assert labels == [label for label in ORDER if label in labels]
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


def test_rewards_have_their_weights() -> None:
    shown = explained("reward=[math,format]", "reward.format.weight=0.5")
    assert section(shown, "score")[0] == "s_i = ω_1 R_1(o_i) + ω_2 R_2(o_i)"
    assert ("ω_2", "reward.format.weight", "0.5") in [(s.name, s.key, s.value) for s in shown.symbols]
    assert any(
        line.startswith("R_3: overlong.")
        for line in section(explained("algorithm=dapo", "reward=[math,format]"), "score")
    )


def test_the_accuracy_of_difficulty_is_named() -> None:
    shown = explained("algorithm=dgpo", "reward=[math,format]")
    assert next(s.meaning for s in shown.symbols if s.name == "R_a") == "The accuracy; null is math"


def test_updates_of_a_step_are_counted() -> None:
    assert section(explained(), "update") == [
        "E M = 1 update per step, of N = P G / M = 256 completions",
        "π_old = sg[π_θ]: with one update per step, r = 1",
    ]
    assert section(explained("train.epochs=2", "train.minibatches=3"), "update") == [
        "E M = 6 updates per step, of N = P G / M ≈ 85 completions",
        "π_old: π_θ before the step's first update",
    ]


def test_truncation_of_the_distribution_is_named() -> None:
    assert section(explained("rollout.top_p=0.9", "rollout.top_k=5"), "sampling")[1].endswith(", cut to top_k, top_p")


def test_other_changes_of_the_distribution_are_named() -> None:
    structured = ["engine=vllm", "algorithm/correction=token_truncate", "rollout.regex=a+"]
    lines = section(explained("rollout.repetition_penalty=1.2", *structured), "sampling")
    assert "logits z of tokens in q or earlier in o_i: z / ν where z > 0, else ν z" in lines
    assert "μ: only tokens that keep o_i within rollout.regex" in lines
    assert not any("ν" in line or "regex" in line for line in section(explained(), "sampling"))


@pytest.mark.slow
def test_explain_compares_the_weight_of_the_length_penalty_with_the_paper() -> None:
    def note(*overrides: str) -> str:
        return next(s.note for s in explained("algorithm=dapo", *overrides).sections if s.label == "score")

    assert note().endswith("With exact_match's scores of 1 and 0, reward.overlong.weight=0.5 is equivalent.")
    assert note("reward=[math]", "reward.math.wrong=-1").endswith(
        "With math's scores of 1 and -1, reward.overlong.weight=0.5 is not equivalent, 1 would be."
    )
    assert "equation 7" not in note("~reward@reward.overlong")


@pytest.mark.slow
def test_explain_names_the_reward_by_which_groups_are_kept() -> None:
    def named(*overrides: str) -> str:
        shown = explained("algorithm=dapo", *overrides)
        return next(s.meaning for s in shown.symbols if s.key == "algorithm.keep.reward")

    assert named() == "The accuracy; null is exact_match"
    assert named("reward=[format,math]", "eval.reward=math") == "The accuracy; null is math"
    mixture = ("task=[arithmetic,gsm8k]", "reward=[exact_match,number]", "task.gsm8k.rewards=[number]")
    assert named(*mixture) == "The accuracy; null is exact_match (arithmetic), number (gsm8k)"
    assert section(explained("algorithm=dapo", "algorithm.keep.reward=score"), "keep")[0] == (
        "keep a question where min_G s < max_G s"
    )


@pytest.mark.slow
def test_supervised_training_has_answers_in_the_place_of_samples_and_scores() -> None:
    found = explained("algorithm=sft")
    labels = [section.label for section in found.sections]
    assert labels == ["sampling", "advantage", "objective", "aggregate", "loss", "update"]
    assert found.sections[0].lines[0].startswith("o_1: the answer of the data")


def test_older_weights_are_corrected_for() -> None:
    """If completions are sampled ahead, there is a correction; otherwise the sampler is the old policy."""
    ahead = ["engine=vllm", "rollout.max_staleness=2"]
    shown = explained(*ahead)
    assert section(shown, "loss") == ["L(θ) = Σ_i w_i Σ_t ( ρ_it ℓ_it + β D_it )"]
    assert section(shown, "correction")[1] == "ρ_it = clip(x_it, 0, 2)"
    assert section(shown, "update")[2:] == ["μ: π_θ of up to 2 steps earlier"]
    uncorrected = section(explained(*ahead, "algorithm/correction=none"), "update")
    assert uncorrected[2:] == ["μ: π_θ of up to 2 steps earlier", "π_old = μ for completions of older weights"]
    carried = explained("algorithm=dapo", "algorithm.keep.surplus=carry")
    assert section(carried, "update")[2:] == ["π_old = μ for completions of older weights"]


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


def test_values_alone_are_compared() -> None:
    found = compared(explained(), explained("algorithm.objective.low=0.1"))
    assert found.sections == ()
    assert found.keys == [["algorithm.objective.low", "0.2", "0.1"]]
    assert "the same formulas; these values differ" in comparison_text(found)
    assert "| `algorithm.objective.low` | 0.2 | 0.1 |" in comparison_markdown(found)


def test_equal_objectives_have_no_difference() -> None:
    found = compared(explained(), explained("optim.lr=1", "algorithm=grpo", "seed=3"))
    assert found.same
    assert "the same objective" in comparison_text(found)
    assert "The same objective." in comparison_markdown(found)


def test_the_terminal_and_the_document_have_the_same_formulas() -> None:
    shown = explained("algorithm=dgpo")
    text, markdown = explanation_text(shown), explanation_markdown(shown)
    block = markdown.split("```text\n")[1].split("```")[0]
    assert block in text
    assert "| T | `algorithm.question_weight.temperature` | 2 |" in markdown
    assert max(map(len, block.splitlines())) <= 80
