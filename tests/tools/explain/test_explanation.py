"""`grpocli explain`: a run, two runs compared, and keys, whose reference says what the code does."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from grpocli.composition.compose import build_run, compose, register_parts, save
from grpocli.composition.hydra_sources import conf_dir
from grpocli.config.yaml_text import flat
from grpocli.runs.sessions import as_typed
from grpocli_tools.explain.explanation import ORDER, Explanation, compared, explanation
from grpocli_tools.explain.keys import ReferenceIndex
from grpocli_tools.explain.render import comparison_markdown, comparison_text, pair_lines

CASES = [
    [],
    ["algorithm=dapo", "reward=[math,format]", "algorithm.keep.reward=math"],
    ["algorithm=drgrpo", "algorithm.objective.dual=3", "algorithm/tokens=top_entropy", "algorithm/entropy=bonus"],
    ["algorithm=dgpo", "algorithm/correction=sequence_mask", "rollout.top_p=0.9", "algorithm/kl=k1"],
    ["algorithm.combine=normalize_then_sum", "algorithm.router_aux_loss_coef=0.01", "algorithm.kl.sync_every=4"],
    ["train.epochs=2", "train.minibatches=3"],
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


NOT_EXPLAINED = {f"algorithm.{key}" for key in ("combine", "advantage_min", "advantage_max", "router_aux_loss_coef")}
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
STRUCTURED = ["engine=vllm", "algorithm/correction=token_truncate"]
STRUCTURED += ["rollout.regex=a+", "rollout.repetition_penalty=1.2"]
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


def test_the_whole_objective_is_printed(grpocli) -> None:
    code, out, err = grpocli("explain", "algorithm=dgpo", "algorithm.question_weight.temperature=3")
    assert (code, err) == (0, "")
    assert "A_i = (s_i − mean_G s) / (MAD_G s + ε)" in out
    assert "MathForge (arXiv 2601.20614)" in out
    row = next(line for line in out.splitlines() if "algorithm.question_weight.temperature " in line)
    assert row.split()[:3] == ["T", "algorithm.question_weight.temperature", "3"]
    assert "\x1b" not in out


def test_two_objectives_are_compared(grpocli) -> None:
    _, out, _ = grpocli("explain", "algorithm=grpo", "vs", "algorithm=dapo", "train.epochs=2", code=0)
    assert "left   algorithm=grpo\nright  algorithm=dapo train.epochs=2\n" in out
    assert ["algorithm.objective.high", "0.2", "0.28"] in [line.split() for line in out.splitlines()]
    assert "std_G" not in out, "both divide by the standard deviation"
    assert "| `algorithm/keep` | dynamic | all |" in grpocli("explain", "algorithm=dapo", "vs", "--markdown")[1]


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["lr=3", "algorithm=vespo", "algorithm.objective.dual=0.5", "task=jsonl", "seed=["])
def test_errors_equal_those_of_train(bad: str, grpocli, tmp_path: Path) -> None:
    train = grpocli("train", bad, f"hydra.run.dir={tmp_path}/run")
    assert grpocli("explain", "algorithm=dapo", "vs", bad) == train
    assert train[:2] == (2, "")


def test_a_user_part_is_explained(grpocli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_explain.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Reinforce:\n"
        '    """−A log π, no ratio at all."""\n'
        "    scale: float = 1.0\n"
        "    def __call__(self, logp, old, advantages, mask):\n"
        "        return -advantages.unsqueeze(1) * logp, {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "conf" / "algorithm" / "objective"
    folder.mkdir(parents=True)
    (folder / "reinforce.yaml").write_text("_target_: mine_for_explain:Reinforce\nscale: 2.5\n")
    _, out, err = grpocli("explain", "--config-dir", str(tmp_path / "conf"), "algorithm/objective=reinforce")
    assert err == ""
    assert "−A log π, no ratio at all." in out
    assert "algorithm.objective.scale=2.5," in out


@pytest.mark.slow
def test_an_existing_run_is_explained(grpocli, tmp_path: Path) -> None:
    overrides = ["algorithm=dgpo", "algorithm.question_weight.temperature=5"]
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(save(compose(overrides)))
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("".join(f"- {one}\n" for one in overrides))
    code, out, err = grpocli("explain", f"resume={tmp_path}/run", "vs", "algorithm=dgpo")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()][-1] == ["algorithm.question_weight.temperature", "5", "2"]


@pytest.fixture(scope="module")
def reference() -> ReferenceIndex:
    register_parts()
    return ReferenceIndex(Path(conf_dir()))


def test_every_key_has_a_meaning_and_a_type(reference: ReferenceIndex) -> None:
    for name, found in reference.keys.items():
        assert all(variant.doc and variant.type for variant in found.variants), name
    config = compose(["algorithm=dapo", "task=hub", "task.path=a/b", "model=hf", "model.path=a/b"])
    for name in flat(OmegaConf.to_container(config, resolve=False)):
        assert name in reference.keys or OmegaConf.is_config(OmegaConf.select(config, name)), name


def test_a_key_states_its_default_its_values_and_an_example(reference: ReferenceIndex) -> None:
    config = compose(["model=hf", "model.path=a/b"])
    for name in ("train.minibatches", "rollout.group_size", "algorithm.objective.high", "optim.lr"):
        assert float(reference.find(name).variants[0].default) == OmegaConf.select(config, name)
        compose(reference.find(name).example.removeprefix("grpocli train ").split())
    assert reference.find("optim.schedule").variants[0].allowed == ("constant", "linear", "cosine")
    assert reference.find("rollout.long_prompts").variants[0].allowed == ("drop", "truncate")
    assert reference.find("train.packed").variants[0].allowed == ("true", "false")


def test_the_choices_that_change_a_default_are_named(reference: ReferenceIndex) -> None:
    for name in ("algorithm.objective.high", "optim.lr", "reward.overlong.weight"):
        for choice, value in reference.find(name).set_by:
            if not choice.startswith("recipe="):
                overrides = [choice] if "overlong_half" not in choice else ["reward=[overlong_half]"]
                overrides += [] if choice.startswith("model=") else ["model=hf", "model.path=a/b"]
                assert OmegaConf.select(compose(overrides), name) == float(value), (name, choice)
    assert ("algorithm=dapo", "0.28") in reference.find("algorithm.objective.high").set_by
    assert ("algorithm=dapo", "dynamic") in reference.find("algorithm/keep").chosen_by


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("train.minibatches", "train.minibatches"),
        ("group_size", "rollout.group_size"),
        ("algorithm.keep", "algorithm/keep"),
        ("objective", "algorithm/objective"),
        ("dapo", "algorithm"),
        ("reward.format", "reward.format"),
        ("hydra.run.dir", "hydra.run.dir"),
    ],
)
def test_a_word_finds_its_key_or_group(reference: ReferenceIndex, word: str, name: str) -> None:
    assert reference.find(word).name == name


def test_the_command_prints_text_markdown_and_json(grpocli) -> None:
    _, out, _ = grpocli("explain", "train.minibatches", "algorithm/keep", code=0)
    assert "train.minibatches\n  Number of optimizer updates per pass.\n" in out
    assert "  TRL          steps_per_generation (default null)\n" in out
    code, out, _ = grpocli("explain", "train.minibatches", "algorithm/keep", "--markdown")
    assert (code, out.count("### `")) == (0, 2)
    assert "| default | 1 |" in out
    code, out, _ = grpocli("explain", "--json", "train.minibatches")
    (found,) = json.loads(out)
    assert (code, found["name"], found["default"]) == (0, "train.minibatches", ["1"])


def test_a_foreign_name_gets_its_equivalent(grpocli) -> None:
    _, out, _ = grpocli("explain", "--from-trl=scale_rewards=batch", "num_generations", "lora_r", code=0)
    assert "algorithm/advantage=batch_std" in out
    assert "here         rollout.group_size=VALUE" in out
