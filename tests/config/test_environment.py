"""Saved configs name environment variables and never contain their values."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composed import again, begun
from omegaconf import OmegaConf

from grpocli.algorithm.kl import NoKL
from grpocli.composition.compose import build_run, compose, save
from grpocli.config.environment import mode_of, without_environment
from grpocli.errors import ConfigError
from grpocli.files import QuietFileHandler
from grpocli.launch.trainer_process import make_recorder
from grpocli.publish.published import model_card
from grpocli.runs.run_dir import RunDir
from grpocli.text import masked
from grpocli.views.view import View

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpocli.text._shown", {})  # other tests have the same password
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setenv("MY_NUMBER", "7")
    monkeypatch.delenv("MY_NOTHING", raising=False)


@pytest.mark.parametrize(
    ("value", "saved"),
    [
        ("${oc.env:MY_SECRET}", "${oc.env:MY_SECRET}"),
        ("key ${oc.env:MY_SECRET}.", "key ${oc.env:MY_SECRET}."),
        (["${oc.env:MY_SECRET}", "${seed}"], ["${oc.env:MY_SECRET}", 3]),
        ({"b": "${..secret}", "c": "${seed}"}, {"b": "${..secret}", "c": 3}),
        ("${secret}", "${secret}"),
        ("${oc.select:secret}", "${oc.select:secret}"),
        ("${both}", "${both}"),
        ("${oc.decode:${oc.env:MY_NUMBER}}", "${oc.decode:${oc.env:MY_NUMBER}}"),
        ("${oc.env:MY_NOTHING,x}", "${oc.env:MY_NOTHING,x}"),
        ("${oc.env:MY_NOTHING}", "${oc.env:MY_NOTHING}"),
        ("${seed}", 3),
        ("\\${seed}", "\\${seed}"),
        (None, None),
        ("???", "???"),
    ],
)
def test_values_from_the_environment_are_saved_as_interpolations(value: object, saved: object) -> None:
    others = {"seed": 3, "secret": "${oc.env:MY_SECRET}", "both": {"x": "${seed}", "y": "${secret}"}}
    config = OmegaConf.create({**others, "a": value, "overrides": ["a=${oc.env:MY_SECRET}", "b=${seed}", "c=${..d}"]})
    kept = without_environment(config)
    assert kept["a"] == saved
    assert kept["overrides"] == ["a=${oc.env:MY_SECRET}", "b=${seed}", "c=${..d}"]
    assert SECRET not in str(kept)
    assert OmegaConf.create({"x": "${oc.env:MY_SECRET}"}).x == SECRET  # reading still gives the value


def test_values_from_the_environment_are_masked(tmp_path: Path) -> None:
    assert OmegaConf.create({"x": "http://${oc.env:MY_SECRET}/v1"}).x == f"http://{SECRET}/v1"
    assert masked(f"no answer at http://{SECRET}/v1") == "no answer at http://${oc.env:MY_SECRET}/v1"
    handler = QuietFileHandler(tmp_path / "run.log")
    handler.handle(logging.LogRecord("grpocli", logging.WARNING, "", 0, "refused: %s", (SECRET,), None))
    handler.close()
    assert (tmp_path / "run.log").read_text() == "refused: ${oc.env:MY_SECRET}\n"


def test_a_saved_config_builds_the_same_run(tmp_path: Path) -> None:
    config = compose(["rollout.stop=['${oc.env:MY_SECRET}']", "seed='${oc.decode:${oc.env:MY_NUMBER}}'"])
    text = save(config)
    assert SECRET not in text
    assert mode_of(text) == 0o600
    assert build_run(OmegaConf.create(text)) == build_run(config)
    assert build_run(config).rollout.stop == [SECRET]
    assert mode_of(save(compose([]))) == 0o644


@pytest.mark.slow
def test_a_resume_keeps_old_and_new_overrides(tmp_path: Path) -> None:
    begun(tmp_path, "rollout.stop=['${oc.env:MY_SECRET}']")
    merged = again(tmp_path, "seed=${oc.env:MY_NUMBER}", "train.steps=7")
    text = save(merged)
    assert SECRET not in text
    assert "\nseed: ${oc.env:MY_NUMBER}\n" in text
    assert "- rollout.stop=['${oc.env:MY_SECRET}']\n- seed=${oc.env:MY_NUMBER}\n" in text
    run = build_run(merged)
    assert (run.rollout.stop, run.seed, run.train.steps) == ([SECRET], 7, 7)


def test_a_model_card_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {_target_: model/hf, path: '${oc.env:MY_SECRET}/model'}\n")
    card = model_card(RunDir(tmp_path), f"{SECRET}/model", {"steps": 1})
    assert SECRET not in card
    assert "| started from | `hf` (`${oc.env:MY_SECRET}/model`) |" in card


def test_a_tracker_gets_names_instead_of_values(tmp_path: Path) -> None:
    begun(tmp_path, "rollout.stop=['${oc.env:MY_SECRET}']")
    given: list[dict[str, Any]] = []
    tracker = SimpleNamespace(start=lambda name, folder, config, done: given.append(config))
    rollout = SimpleNamespace(sampling=SimpleNamespace(structure=None))
    parts = {"tracker": tracker, "rollout": rollout, "algorithm": SimpleNamespace(kl=NoKL()), "reward": {}}
    plain = {"name": "", "callbacks": [], "hub": SimpleNamespace(push=None)}
    job = SimpleNamespace(checkpoint=None, engine=SimpleNamespace(dtype="float32"))
    make_recorder(SimpleNamespace(**parts, **plain), RunDir(tmp_path), SimpleNamespace(is_main=True), job, View())  # type: ignore[arg-type]
    assert given[0]["rollout"]["stop"] == ["${oc.env:MY_SECRET}"]
    assert SECRET not in str(given)


@pytest.mark.slow
def test_an_unset_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path, "rollout.stop=['${oc.env:MY_SECRET}']")
    monkeypatch.delenv("MY_SECRET")
    sentence = r"^rollout\.stop\[0\] needs the environment variable MY_SECRET, which is not set: export it$"
    with pytest.raises(ConfigError, match=sentence):
        build_run(again(tmp_path))
    merged = again(tmp_path, "rollout.stop=[b]")  # the variable is not needed any more
    assert build_run(merged).rollout.stop == ["b"]
    assert "MY_SECRET" in save(merged)  # in the earlier override
