"""Overrides to a config and its folder, and a config to live objects."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.hydra_errors import choices_in, hydra_errors, two_of_one_name
from grpocli.composition.hydra_sources import cleared_hydra, conf_dir, extend_hydra
from grpocli.composition.overrides import rewrite
from grpocli.config.build import build
from grpocli.config.environment import OVERRIDES, needs_environment, without_environment
from grpocli.config.overrides import texts_of
from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli.plugins import load, plugins

if TYPE_CHECKING:
    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Run
    from grpocli.runs.run_dir import RunDir

logger = logging.getLogger(__name__)

RECORD = ".hydra"
"""The folder of Hydra's record in a run's folder."""


def register_parts() -> None:
    """Register the parts of this package and of installed packages. Safe to call again.

    A package declares its parts with `[project.entry-points."grpocli.parts"] NAME = "module"`.
    """
    import grpocli.composition.part_modules  # noqa: F401 - its imports register the parts of this package

    for plugin in plugins("grpocli.parts").values():
        load(plugin)
    extend_hydra()


def compose(overrides: list[str], config_name: str = "train", *, with_hydra: bool = False) -> DictConfig:
    """Compose the config that `grpocli train OVERRIDES` would run. Raises ConfigError.

    with_hydra: keep Hydra's own keys, such as the folder of the run.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register_parts()
    overrides = rewrite(overrides, config_name)
    with (
        hydra_errors(overrides, config_name),
        cleared_hydra(),
        initialize_config_dir(conf_dir(), version_base="1.3"),
    ):
        try:
            config = cast("DictConfig", hydra_compose(config_name, overrides, return_hydra_config=True))
            resolve_hydra(config)
            if not with_hydra:
                with open_dict(config):
                    del config["hydra"]
        except (TypeError, ValueError) as error:  # Hydra raises these for a choice that is null or a list in a list
            if str(error).startswith("Invalid defaults list"):
                raise
            hint = "a choice is GROUP=NAME or GROUP=[A,B]"
            raise ConfigError("cannot be read", key=choices_in(overrides), hint=hint) from error
    _refuse_equal_packages(overrides, config)
    return config


def resolve_hydra(config: DictConfig) -> None:
    """Put the values of `${hydra:...}` into a config with Hydra's keys; otherwise only jobs of Hydra know them."""
    found = [leaf for key in config if key != "hydra" for leaf in _of_hydra(config, key)]
    if not found:
        return
    known = HydraConfig.instance()
    before = known.cfg  # the caller may be a Hydra app itself
    known.set_config(config)
    try:
        for node, key in found:
            node[key] = node[key]
    finally:
        known.cfg = before


def _of_hydra(node: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    """The places below a key whose interpolation reads Hydra's config."""
    leaf = node._get_node(key)
    if OmegaConf.is_config(leaf) and not (leaf._is_none() or leaf._is_interpolation() or leaf._is_missing()):
        inner = leaf.keys() if isinstance(leaf, DictConfig) else range(len(leaf))
        yield from (place for name in inner for place in _of_hydra(leaf, name))
    elif "${hydra:" in str(leaf._value()):
        yield node, key


def _refuse_equal_packages(overrides: list[str], config: DictConfig) -> None:
    """Raise ConfigError if two rewards of a list have the same keys.

    A function may have the name of another choice, and a copied YAML may keep its `# @package` line.
    """
    chosen = next((o for o in reversed(overrides) if o.startswith("reward=[")), None)
    removed = any(o.startswith("~reward") for o in overrides)
    if chosen and not removed and len(set(texts_of(chosen))) > len(config.reward):
        raise two_of_one_name(chosen)


def build_run(config: DictConfig) -> Run:
    """Build the run, and check keys that depend on each other. Raises ConfigError."""
    from grpocli.composition.validate import check_run

    if config.get(OVERRIDES, None) is not None:  # the recorded command line may name an unset variable
        config = OmegaConf.merge(config, {OVERRIDES: []})  # type: ignore[assignment]
    run = cast("Run", build(config))
    for name, reward in run.reward.items():  # errors name the key in this run rather than the choice
        object.__setattr__(reward, "config_key", f"reward.{name}")
    check_run(run)
    return without_no_reward(run)


def saved_run(run_dir: RunDir) -> Run:
    """The run with the config in its folder. Raises ConfigError."""
    register_parts()
    return build_run(OmegaConf.load(run_dir.config))  # type: ignore[arg-type]


def without_no_reward(run: Run) -> Run:
    """The run itself, or for `reward=none` a run without rewards, whose tasks need no column of answers."""
    from grpocli.rewards.reward import NoReward
    from grpocli.tasks.task import without_answers

    if not any(isinstance(reward, NoReward) for reward in run.reward.values()):
        return run
    return replace(run, reward={}, task=without_answers(run.task))


def build_algorithm(*overrides: str) -> Algorithm:
    """See `grpocli.build_algorithm`."""
    config = compose(list(overrides))
    _warn_of_default_length(config, overrides)
    return cast("Algorithm", build(config.algorithm))


def _warn_of_default_length(config: DictConfig, overrides: Sequence[str]) -> None:
    """Warn if Dr. GRPO's length is the default run's, because a trainer of the user may have another one."""
    aggregate, limit = config.algorithm.aggregate, "rollout.max_completion_tokens"
    follows_run = "length" in aggregate and OmegaConf.is_interpolation(aggregate, "length")
    if follows_run and not any(o.lstrip("+").startswith(limit) for o in overrides):
        logger.warning(
            "build_algorithm: algorithm.aggregate.length is %d, %s of grpocli's default run; give "
            '"algorithm.aggregate.length=N" with your own limit',
            aggregate.length,
            limit,
        )


def save(config: DictConfig) -> str:
    """The config as YAML, resolved except for values from environment variables."""
    return OmegaConf.to_yaml(OmegaConf.create(without_environment(config)))


def mode_of(text: str) -> int:
    """The mode of a file with this config: private if it reads environment variables."""
    return 0o600 if needs_environment(text) else 0o644


def run_folder(config: DictConfig) -> Path | None:
    """The folder of the run with this config, which has Hydra's keys; None if Hydra will refuse its name."""
    with suppress(OmegaConfBaseException):
        return Path(str(config.hydra.run.dir)).absolute()
    return None


def sweep_folder(overrides: list[str]) -> Path | None:
    """The folder of a sweep's first run; None if Hydra will refuse the overrides."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    register_parts()
    with (
        suppress(HydraException, OmegaConfBaseException),
        cleared_hydra(),
        initialize_config_dir(conf_dir(), version_base="1.3"),
    ):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config("train", overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
        return Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
    return None


def write_record(folder: Path, config: DictConfig) -> None:
    """Write the files that Hydra would write to `hydra.output_subdir`. Called within a Hydra job.

    `hydra.output_subdir` is null, because Hydra would write them before the folder is known to be free.
    """
    hydra = HydraConfig.get()
    files = {"config": config, "hydra": OmegaConf.create({"hydra": hydra}), "overrides": hydra.overrides.task}
    (folder / RECORD).mkdir(exist_ok=True)
    for name, content in files.items():
        text = OmegaConf.to_yaml(content)
        write_atomic(folder / RECORD / f"{name}.yaml", text, mode_of(text))
