"""`grpocli explain` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpocli.composition.compose import compose, save

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("word", ["versus", "vs.", "VS"])
def test_another_word_for_vs_gets_advice(grpocli, word: str) -> None:
    code, out, err = grpocli("explain", "algorithm=grpo", word, "algorithm=dapo")
    assert (code, out, err) == (2, "", f"grpocli: error: {word}: write vs between the two lists of overrides\n")


def test_the_whole_objective_is_printed(grpocli: Command) -> None:
    code, out, err = grpocli("explain", "algorithm=dgpo", "algorithm.question_weight.temperature=3")
    assert (code, err) == (0, "")
    assert "A_i = (s_i − mean_G s) / (MAD_G s + ε)" in out
    assert "L(θ) = Σ_i w_i Σ_t ℓ_it" in out
    assert "MathForge (arXiv 2601.20614)" in out
    row = next(line for line in out.splitlines() if "algorithm.question_weight.temperature " in line)
    assert row.split()[:3] == ["T", "algorithm.question_weight.temperature", "3"]
    assert "\x1b" not in out


def test_two_objectives_are_compared(grpocli: Command) -> None:
    code, out, _ = grpocli("explain", "algorithm=grpo", "vs", "algorithm=dapo", "train.epochs=2")
    assert code == 0
    assert "left   algorithm=grpo\nright  algorithm=dapo train.epochs=2\n" in out
    assert ["algorithm.objective.high", "0.2", "0.28"] in [line.split() for line in out.splitlines()]
    assert ["train.epochs", "1", "2"] in [line.split() for line in out.splitlines()]
    assert "std_G" not in out, "both divide by the standard deviation"


@pytest.mark.slow
def test_markdown_is_printed(grpocli: Command) -> None:
    _, out, _ = grpocli("explain", "--markdown", "algorithm=dapo")
    assert out.startswith("`grpocli explain algorithm=dapo`\n\n```text\n")
    assert "| ε_high | `algorithm.objective.high` | 0.28 |" in out
    _, out, _ = grpocli("explain", "algorithm=dapo", "vs", "--markdown")
    assert "| `algorithm/keep` | dynamic | all |" in out


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["lr=3", "algorithm=vespo", "algorithm.objective.dual=0.5", "task=jsonl", "seed=["])
def test_errors_equal_those_of_train(bad: str, grpocli: Command, tmp_path: Path) -> None:
    train = grpocli("train", bad, f"hydra.run.dir={tmp_path}/run")
    assert grpocli("explain", bad) == train
    assert grpocli("explain", "algorithm=dapo", "vs", bad) == train
    assert train[0] == 2
    assert train[1] == ""


def test_more_than_two_objectives_are_refused(grpocli: Command) -> None:
    code, _, err = grpocli("explain", "vs", "algorithm=dapo", "vs")
    assert code == 2
    assert "vs: compares two configs, not 3" in err


def test_an_unknown_option_is_refused(grpocli: Command) -> None:
    code, _, err = grpocli("explain", "--mrkdown")
    assert code == 2
    assert "--mrkdown" in err


def test_help_has_examples(grpocli: Command) -> None:
    code, out, _ = grpocli("explain", "--help")
    assert code == 0
    assert "grpocli explain algorithm=grpo vs algorithm=dapo train.epochs=2" in out


def test_a_user_part_is_explained(grpocli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_explain.py").write_text(
        "class Reinforce:\n"
        '    """−A log π, no ratio at all."""\n'
        "    def __call__(self, logp, old, advantages, mask):\n"
        "        return -advantages.unsqueeze(1) * logp, {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "conf" / "algorithm" / "objective"
    folder.mkdir(parents=True)
    (folder / "reinforce.yaml").write_text("_target_: mine_for_explain.Reinforce\n")
    _, out, err = grpocli("explain", "--config-dir", str(tmp_path / "conf"), "algorithm/objective=reinforce")
    assert err == ""
    assert "−A log π, no ratio at all." in out


@pytest.mark.slow
def test_an_existing_run_is_explained(grpocli: Command, tmp_path: Path) -> None:
    overrides = ["algorithm=dgpo", "algorithm.question_weight.temperature=5"]
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(save(compose(overrides)))
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(overrides)))
    code, out, err = grpocli("explain", f"resume={tmp_path}/run", "vs", "algorithm=dgpo")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()][-1] == ["algorithm.question_weight.temperature", "5", "2"]
