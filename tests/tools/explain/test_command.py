"""`grpocli explain` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpocli.composition.compose import compose, save

Command = Callable[..., tuple[int, str, str]]


def test_the_whole_objective_is_printed(grpocli: Command) -> None:
    code, out, err = grpocli("explain", "algorithm=dgpo", "algorithm.question_weight.temperature=3")
    assert (code, err) == (0, "")
    assert "A_i = (s_i − mean_G s) / (MAD_G s + ε)" in out
    assert "MathForge (arXiv 2601.20614)" in out
    row = next(line for line in out.splitlines() if "algorithm.question_weight.temperature " in line)
    assert row.split()[:3] == ["T", "algorithm.question_weight.temperature", "3"]
    assert "\x1b" not in out


def test_two_objectives_are_compared(grpocli: Command) -> None:
    code, out, _ = grpocli("explain", "algorithm=grpo", "vs", "algorithm=dapo", "train.epochs=2")
    assert code == 0
    assert "left   algorithm=grpo\nright  algorithm=dapo train.epochs=2\n" in out
    assert ["algorithm.objective.high", "0.2", "0.28"] in [line.split() for line in out.splitlines()]
    assert "std_G" not in out, "both divide by the standard deviation"
    _, out, _ = grpocli("explain", "algorithm=dapo", "vs", "--markdown")
    assert "| `algorithm/keep` | dynamic | all |" in out


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["lr=3", "algorithm=vespo", "algorithm.objective.dual=0.5", "task=jsonl", "seed=["])
def test_errors_equal_those_of_train(bad: str, grpocli: Command, tmp_path: Path) -> None:
    train = grpocli("train", bad, f"hydra.run.dir={tmp_path}/run")
    assert grpocli("explain", "algorithm=dapo", "vs", bad) == train
    assert train[:2] == (2, "")


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
    (folder / "reinforce.yaml").write_text("_target_: mine_for_explain:Reinforce\n")
    _, out, err = grpocli("explain", "--config-dir", str(tmp_path / "conf"), "algorithm/objective=reinforce")
    assert err == ""
    assert "−A log π, no ratio at all." in out


@pytest.mark.slow
def test_an_existing_run_is_explained(grpocli: Command, tmp_path: Path) -> None:
    overrides = ["algorithm=dgpo", "algorithm.question_weight.temperature=5"]
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(save(compose(overrides)))
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("".join(f"- {one}\n" for one in overrides))
    code, out, err = grpocli("explain", f"resume={tmp_path}/run", "vs", "algorithm=dgpo")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()][-1] == ["algorithm.question_weight.temperature", "5", "2"]
