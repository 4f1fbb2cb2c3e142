"""`grpocli explain KEY`: what the reference of keys says is what the code does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpocli.composition.compose import compose, register_parts
from grpocli.composition.hydra_sources import conf_dir
from grpocli.config.yaml_text import flat
from grpocli_tools.explain.keys import GroupReference, KeyReference, ReferenceIndex

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def reference() -> ReferenceIndex:
    register_parts()
    return ReferenceIndex(Path(conf_dir()))


def key(reference: ReferenceIndex, name: str) -> KeyReference:
    found = reference.find(name)
    assert isinstance(found, KeyReference)
    return found


def test_every_key_has_a_meaning_and_a_type(reference: ReferenceIndex) -> None:
    for name, found in reference.keys.items():
        assert all(variant.doc and variant.type for variant in found.variants), name
    config = compose(["algorithm=dapo", "task=hub", "task.path=a/b", "model=hf", "model.path=a/b"])
    for name in flat(OmegaConf.to_container(config, resolve=False)):
        assert name in reference.keys or OmegaConf.is_config(OmegaConf.select(config, name)), name


def test_a_key_states_its_default_its_values_and_an_example(reference: ReferenceIndex) -> None:
    config = compose(["model=hf", "model.path=a/b"])
    for name in ("train.minibatches", "rollout.group_size", "algorithm.objective.high", "optim.lr"):
        assert float(key(reference, name).variants[0].default) == OmegaConf.select(config, name)
        compose(key(reference, name).example.removeprefix("grpocli train ").split())
    assert key(reference, "optim.schedule").variants[0].allowed == ("constant", "linear", "cosine")
    assert key(reference, "rollout.long_prompts").variants[0].allowed == ("drop", "truncate")
    assert key(reference, "train.packed").variants[0].allowed == ("true", "false")


def test_the_choices_that_change_a_default_are_named(reference: ReferenceIndex) -> None:
    for name in ("algorithm.objective.high", "optim.lr", "reward.overlong.weight"):
        for choice, value in key(reference, name).set_by:
            if not choice.startswith("recipe="):
                overrides = [choice] if "overlong_half" not in choice else ["reward=[overlong_half]"]
                overrides += [] if choice.startswith("model=") else ["model=hf", "model.path=a/b"]
                assert OmegaConf.select(compose(overrides), name) == float(value), (name, choice)
    assert ("algorithm=dapo", "0.28") in key(reference, "algorithm.objective.high").set_by
    keep = reference.find("algorithm/keep")
    assert isinstance(keep, GroupReference)
    assert ("algorithm=dapo", "dynamic") in keep.chosen_by


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


def test_the_command_prints_text_markdown_and_json(grpocli: Command) -> None:
    code, out, _ = grpocli("explain", "train.minibatches", "algorithm/keep")
    assert code == 0
    assert "train.minibatches\n  Number of optimizer updates per pass.\n" in out
    assert "  TRL          steps_per_generation (default null)\n" in out
    code, out, _ = grpocli("explain", "train.minibatches", "algorithm/keep", "--markdown")
    assert (code, out.count("### `")) == (0, 2)
    assert "| default | 1 |" in out
    code, out, _ = grpocli("explain", "--json", "train.minibatches")
    (found,) = json.loads(out)
    assert (code, found["name"], found["default"]) == (0, "train.minibatches", ["1"])


def test_a_foreign_name_gets_its_equivalent(grpocli: Command) -> None:
    code, out, _ = grpocli("explain", "--from-trl=scale_rewards=batch", "num_generations", "lora_r")
    assert code == 0
    assert "algorithm/advantage=batch_std" in out
    assert "here         rollout.group_size=VALUE" in out
