"""From overrides to a config, and from a config to live objects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig, OmegaConf

from grpocli.config.build import build
from grpocli.config.environment import OVERRIDES, needs_environment, without_environment
from grpocli.errors import ConfigError
from grpocli.launch.hydra_errors import hydra_errors
from grpocli.launch.hydra_sources import beside_another_hydra, conf_dir, extend_hydra
from grpocli.launch.overrides import rewritten

if TYPE_CHECKING:
    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Run

logger = logging.getLogger(__name__)


def register_parts() -> None:
    """Register the parts of this package and of installed packages. Safe to call again.

    A package declares its parts with `[project.entry-points."grpocli.parts"] NAME = "module"`.
    """
    import grpocli.launch.part_modules  # noqa: F401 - its imports register the parts of this package

    for plugin in entry_points(group="grpocli.parts"):
        plugin.load()
    extend_hydra()


def compose(overrides: list[str], config_name: str = "train") -> DictConfig:
    """The config that `grpocli train OVERRIDES` would run, outside of Hydra's command line."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register_parts()
    overrides = rewritten(overrides, config_name)
    with (
        hydra_errors(overrides, config_name),
        beside_another_hydra(),
        initialize_config_dir(conf_dir(), version_base="1.3"),
    ):
        try:
            return cast("DictConfig", hydra_compose(config_name, overrides=overrides))
        except (TypeError, ValueError) as error:  # Hydra raises these for a choice that is null or a list in a list
            choices = " ".join(o for o in overrides if "." not in o.partition("=")[0])
            raise ConfigError("cannot be read", key=choices, hint="a choice is GROUP=NAME or GROUP=[A,B]") from error


def build_run(config: DictConfig) -> Run:
    """`build`, then the checks that look at several keys at once."""
    from grpocli.launch.validate import check_run

    if config.get(OVERRIDES, None) is not None:  # what was typed is a record: a variable that it names may be gone
        config = OmegaConf.merge(config, {OVERRIDES: []})  # type: ignore[assignment]
    run = cast("Run", build(config))
    for name, reward in run.reward.items():  # errors name the keys of this run, whatever the choice is called
        object.__setattr__(reward, "config_key", f"reward.{name}")
    check_run(run)
    return run


def build_algorithm(*overrides: str) -> Algorithm:
    """See `grpocli.build_algorithm`."""
    config = compose(list(overrides))
    _warn_of_borrowed_length(config, overrides)
    return cast("Algorithm", build(config.algorithm))


def _warn_of_borrowed_length(config: DictConfig, overrides: Sequence[str]) -> None:
    """Dr. GRPO's length follows a key of the run; outside of a run nobody may have thought of that one."""
    aggregate, limit = config.algorithm.aggregate, "rollout.max_completion_tokens"
    borrowed = "length" in aggregate and OmegaConf.is_interpolation(aggregate, "length")
    if borrowed and not any(o.lstrip("+").startswith(limit) for o in overrides):
        logger.warning(
            "build_algorithm: algorithm.aggregate.length is %d, %s of grpocli's default run; give "
            '"algorithm.aggregate.length=N" with your own limit',
            aggregate.length,
            limit,
        )


def save(config: DictConfig) -> str:
    """The config as YAML: resolved, but for what comes from the environment."""
    return OmegaConf.to_yaml(OmegaConf.create(without_environment(config)))


def mode_of(text: str) -> int:
    """The permissions of a file with a saved config: its owner's alone where its values come from the environment."""
    return 0o600 if needs_environment(text) else 0o644
