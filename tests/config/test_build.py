"""Saved configs name choices instead of module paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from composed import again, begun
from omegaconf import OmegaConf

from grpocli.composition.compose import build_run, compose, save
from grpocli.config.build import build
from grpocli.config.parts import CLASSES
from grpocli.errors import ConfigError
from grpocli.types import Sampling


def test_a_saved_config_has_no_module_path() -> None:
    assert "grpocli." not in save(compose(["algorithm=dapo", "reward=[math,format]", "task=[gsm8k,arithmetic]"]))


def test_a_run_resumes_after_a_class_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path, "reward=[math]", "seed=3")
    moved = type("Elsewhere", (CLASSES["reward/math"],), {"__module__": "elsewhere"})
    monkeypatch.setitem(CLASSES, "reward/math", moved)
    run = build_run(again(tmp_path, "train.steps=70"))
    assert type(run.reward["math"]) is moved
    assert (run.seed, run.train.steps) == (3, 70)


def test_an_unknown_choice_in_a_saved_config_gives_a_one_sentence_error() -> None:
    with pytest.raises(ConfigError, match=r"^_target_=reward/theirs: no choice has this name; install the package"):
        build(OmegaConf.create({"_target_": "reward/theirs"}))
    with pytest.raises(ConfigError, match=r"^reward\.a\._target_=nowhere\.Reward: cannot be imported"):
        build(OmegaConf.create({"reward": {"a": {"_target_": "nowhere.Reward"}}}))


def test_a_class_without_a_choice_is_imported() -> None:
    made = build(OmegaConf.create({"_target_": "grpocli.types.Sampling", "max_tokens": 3}))
    assert made == Sampling(3)


def test_only_parts_are_built(tmp_path: Path) -> None:
    for target, values in (("os.makedirs", {"name": "made"}), ("logging.FileHandler", {"filename": "made"})):
        values = {key: f"{tmp_path}/{value}" for key, value in values.items()}
        with pytest.raises(ConfigError, match=rf"^optim\._target_={target}: is not a part of a run; name a choice"):
            build(OmegaConf.create({"optim": {"_target_": target, **values}}))
    assert not (tmp_path / "made").exists()
