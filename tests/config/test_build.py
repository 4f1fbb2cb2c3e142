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
    with pytest.raises(ConfigError, match=r"^_target_=reward/theirs: no choice has this name; name a choice"):
        build(OmegaConf.create({"_target_": "reward/theirs"}))


def test_only_parts_are_built(tmp_path: Path) -> None:
    calls = [("os:makedirs", {"name": "made"}), ("logging:FileHandler", {"filename": "made"}), ("os.makedirs", {})]
    for target, values in calls:
        values = {key: f"{tmp_path}/{value}" for key, value in values.items()}
        with pytest.raises(ConfigError) as refused:
            build(OmegaConf.create({"optim": {"_target_": target, **values}}))
        assert refused.value.key.startswith("optim")
    assert not (tmp_path / "made").exists()
