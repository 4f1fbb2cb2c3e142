"""The config of a run that began with other defaults."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from grpocli.algorithm.correction import NoCorrection, TokenMask
from grpocli.config.compose import build_run, compose, save
from grpocli.config.resume import Resume
from grpocli.config.schema import Run


def resumed(folder: Path, began_with: list[str], now: list[str], *overrides: str) -> Run:
    """A run that began with the defaults `began_with`, of which its `overrides` say nothing."""
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(list(overrides))))
    (folder / "config.yaml").write_text(save(compose([*overrides, *began_with])))
    resume = Resume(folder, now)
    return build_run(resume.merged(compose([o for o in resume.overrides([]) if not o.startswith(("resume", "hydra"))])))


def test_a_default_choice_that_has_changed_since_stays_what_it_was(tmp_path: Path) -> None:
    run = resumed(tmp_path, ["algorithm/correction=none", "algorithm/advantage=center"], ["train.steps=7"])
    assert run.algorithm.correction == NoCorrection()
    assert type(run.algorithm.advantage).__name__ == "Center"
    assert run.train.steps == 7


def test_what_is_given_now_changes_it(tmp_path: Path) -> None:
    run = resumed(tmp_path, ["algorithm/correction=none"], ["algorithm/correction=token_mask"])
    assert run.algorithm.correction == TokenMask()


def test_what_follows_a_key_that_is_given_now_follows_it(tmp_path: Path) -> None:
    run = resumed(tmp_path, ["engine=vllm"], ["rollout.max_staleness=1"])
    assert run.algorithm.corrects
    assert resumed_length(tmp_path / "a", "rollout.max_completion_tokens=20") == 30
    assert resumed_length(tmp_path / "b", "algorithm.aggregate.length=20") == 20


def resumed_length(folder: Path, began_with: str) -> int:
    """Of Dr. GRPO's constant, after a resume with another limit of completions."""
    folder.mkdir()
    run = resumed(folder, [], ["rollout.max_completion_tokens=30"], "algorithm=drgrpo", began_with)
    return int(run.algorithm.aggregate.length)
