"""`grpocli explain KEY`: what the reference of keys says is what the code does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpocli.composition.compose import build_run, compose, register_parts
from grpocli.composition.hydra_sources import conf_dir
from grpocli.config.build import flat_keys
from grpocli.errors import ConfigError
from grpocli_tools.explain.foreign import find
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


@pytest.mark.parametrize(
    "overrides", [(), ("algorithm=dapo", "task=hub", "task.path=a/b", "model=hf", "model.path=a/b")]
)
def test_every_key_of_a_config_has_a_reference(reference: ReferenceIndex, overrides: tuple[str, ...]) -> None:
    config = compose(list(overrides))
    for name in flat_keys(OmegaConf.to_container(config, resolve=False)):
        if not OmegaConf.is_config(OmegaConf.select(config, name)):
            assert key(reference, name).variants[0].doc, name


def test_every_key_has_a_meaning_and_a_type(reference: ReferenceIndex) -> None:
    for name, found in reference.keys.items():
        for variant in found.variants:
            assert variant.doc, name
            assert variant.type, name


def test_the_stated_default_is_that_of_the_default_run(reference: ReferenceIndex) -> None:
    config = compose(["model=hf", "model.path=a/b"])
    for name in ("train.minibatches", "rollout.group_size", "algorithm.objective.high", "optim.lr", "engine.max_rows"):
        if (value := OmegaConf.select(config, name)) is not None:
            assert float(key(reference, name).variants[0].default) == value


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


def test_allowed_values_come_from_the_class(reference: ReferenceIndex) -> None:
    assert key(reference, "optim.schedule").variants[0].allowed[:2] == ("constant", "constant_with_warmup")
    assert key(reference, "rollout.long_prompts").variants[0].allowed == ("drop", "truncate")
    assert key(reference, "train.packed").variants[0].allowed == ("true", "false")


@pytest.mark.slow
def test_examples_compose(reference: ReferenceIndex) -> None:
    for name in ("train.minibatches", "algorithm.objective.high", "reward.format.weight", "optim.schedule", "seed"):
        words = key(reference, name).example.removeprefix("grpocli train ").split()
        build_run(compose(words))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("train.minibatches", "train.minibatches"),
        ("group_size", "rollout.group_size"),
        ("algorithm.keep", "algorithm/keep"),
        ("objective", "algorithm/objective"),
        ("dapo", "algorithm"),
        ("reward.format", "reward.format"),
        ("model.lora", "model.lora"),
        ("hydra.run.dir", "hydra.run.dir"),
    ],
)
def test_a_word_finds_its_key_or_group(reference: ReferenceIndex, word: str, name: str) -> None:
    assert reference.find(word).name == name


def test_a_typo_gets_the_nearest_key(reference: ReferenceIndex) -> None:
    with pytest.raises(ConfigError, match=r'there is no key train\.minibatch; did you mean "train.minibatches"'):
        reference.find("train.minibatch")
    with pytest.raises(ConfigError, match="several keys have this name; choose reward"):
        reference.find("weight")
    with pytest.raises(ConfigError, match="it is a name of TRL: grpocli explain --from-trl num_generations"):
        reference.find("num_generations")


def test_the_command_prints_text_markdown_and_json(grpocli: Command) -> None:
    code, out, _ = grpocli("explain", "train.minibatches")
    assert code == 0
    assert "Number of optimizer updates per pass." in out
    assert "steps_per_generation" in out
    code, out, _ = grpocli("explain", "train.minibatches", "algorithm/keep", "--markdown")
    assert code == 0
    assert "### `train.minibatches`" in out
    assert "### `algorithm/keep`" in out
    code, out, _ = grpocli("explain", "--json", "train.minibatches")
    assert '"default": "1"' in out


def test_a_key_beside_overrides_is_refused(grpocli: Command) -> None:
    code, out, err = grpocli("explain", "train.steps", "seed=1")
    assert (code, out) == (2, "")
    assert err.startswith("grpocli: error: train.steps: a key cannot stand beside seed=1; write `grpocli explain tra")


def test_a_foreign_name_gets_its_equivalent(grpocli: Command) -> None:
    code, out, _ = grpocli("explain", "--from-trl", "num_generations")
    assert code == 0
    assert "rollout.group_size=VALUE" in out
    code, out, _ = grpocli("explain", "--from-trl", "scale_rewards=batch")
    assert "algorithm/advantage=batch_std" in out
    code, _, err = grpocli("explain", "--from-trl", "num_generation")
    assert code == 2
    assert 'did you mean "num_generations"?' in err


def test_an_empty_word_is_refused(reference: ReferenceIndex) -> None:
    with pytest.raises(ConfigError, match="the key is empty"):
        reference.find("")
    with pytest.raises(ConfigError, match="--from-trl: the name is empty"):
        find("--", reference)
