"""Composes a config from overrides, builds its objects, and runs it as a job of Hydra's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.checks import check_composed
from grpocli.composition.hydra_errors import choices_in, hydra_errors, two_of_one_name
from grpocli.composition.hydra_sources import composer, extend_hydra
from grpocli.composition.overrides import rewrite, texts_of
from grpocli.config.build import build
from grpocli.config.environment import OVERRIDES, mode_of, without_environment
from grpocli.config.yaml_text import leaves
from grpocli.errors import config_errors
from grpocli.files import write_atomic
from grpocli.plugins import load, plugins
from grpocli.runs.saved_run import SavedRun

if TYPE_CHECKING:
    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Run
    from grpocli.runs.run_dir import RunDir

logger = logging.getLogger(__name__)

PART_MODULES = {
    "": "hardware",
    "algorithm": "advantage aggregate algorithm correction entropy kl objective",
    "config": "schema",
    "environments": "environment",
    "models": "loading tiny",
    "rewards": "code judge length python reward reward_model rule_based",
    "rollout": "fake_engine sync_config transformers_engine vllm.config vllm.engine_parts",
    "tasks": "generated table task",
    "tracking": "trackers",
    "training": "optim",
}
"""{room: its modules with parts}; imported at every start, so they import nothing heavy at the top."""
RECORD = ".hydra"
"""The folder of Hydra's record in a run's folder."""


def register_parts() -> None:
    """Register the parts of this package and of installed packages. Safe to call again.

    A package declares its parts with `[project.entry-points."grpocli.parts"] NAME = "module"`.
    """
    for room, names in PART_MODULES.items():
        for name in names.split():
            import_module(".".join(filter(None, ["grpocli", room, name])))
    for plugin in plugins("grpocli.parts").values():
        load(plugin)
    extend_hydra()


def compose(overrides: list[str], config_name: str = "train", *, with_hydra: bool = False) -> DictConfig:
    """Compose the config that `grpocli train OVERRIDES` would run. Raises ConfigError.

    with_hydra: keep Hydra's own keys, such as the folder of the run.
    """
    from hydra.types import RunMode

    register_parts()
    overrides = rewrite(overrides)
    with hydra_errors(overrides, config_name), composer(config_name) as hydra:
        # Hydra raises these for a choice that is null or a list in a list
        with config_errors(TypeError, ValueError, says="Hydra cannot read it: {}", key=choices_in(overrides)):
            config = cast("DictConfig", hydra.compose_config(config_name, overrides, RunMode.RUN, from_shell=False))
        resolve_hydra(config)
    chosen = next((one for one in reversed(overrides) if one.startswith("reward=[")), None)
    removed = any(one.startswith("~reward") for one in overrides)
    if chosen and not removed and len(set(texts_of(chosen))) > len(config.get("reward", {})):
        raise two_of_one_name(chosen)
    return config if with_hydra else without_hydra(config)


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy of the config without Hydra's own keys."""
    kept = config.copy()
    with open_dict(kept):
        del kept["hydra"]
    return kept


def resolve_hydra(config: DictConfig) -> None:
    """Put the values of `${hydra:...}` into a config with Hydra's keys; otherwise only jobs of Hydra know them."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    del plain["hydra"]
    keys = dict.fromkeys(key for key, value in leaves(plain) if "${hydra:" in str(value))
    known = HydraConfig.instance()
    before = known.cfg  # the caller may be a Hydra app itself
    known.set_config(config)
    try:
        for key in keys:
            value = OmegaConf.select(config, key)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            OmegaConf.update(config, key, value)
    finally:
        known.cfg = before


def build_run(config: DictConfig) -> Run:
    """Build the run, and check keys that depend on each other. Raises ConfigError."""
    run = _built(config)
    check_composed(run)
    return run


def saved_run(run_dir: RunDir) -> Run:
    """The run with the config in its folder, which the launching process has checked. Raises ConfigError."""
    register_parts()
    return _built(OmegaConf.create(SavedRun(run_dir.path).read_config()))


def _built(config: DictConfig) -> Run:
    """The run; with `reward=none` one without rewards, whose tasks need no column of answers."""
    from grpocli.rewards.reward import NoReward
    from grpocli.tasks.task import without_answers

    if config.get(OVERRIDES, None) is not None:  # the recorded command line may name an unset variable
        config = OmegaConf.merge(config, {OVERRIDES: []})  # type: ignore[assignment]
    run = cast("Run", build(config))
    for name, reward in run.reward.items():  # errors name the key in this run rather than the choice
        object.__setattr__(reward, "config_key", f"reward.{name}")
    scoring = {name: reward for name, reward in run.reward.items() if not isinstance(reward, NoReward)}
    return run if scoring else replace(run, reward={}, task=without_answers(run.task))


def run_job(config: DictConfig, task: Callable[[DictConfig], Any]) -> Any:
    """Run `task` as the job of a config with Hydra's keys: with its folder, its log and `HydraConfig`.

    Raises the errors of `task`, and ConfigError for a folder that cannot be made.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra.core.utils import JobStatus
    from hydra.core.utils import run_job as run_hydra_job
    from hydra.types import HydraContext

    with composer(config.hydra.job.config_name) as hydra:
        context = HydraContext(hydra.config_loader, Callbacks(config))
        with config_errors(OSError, says="cannot be written: {}", why=str, key="hydra.run.dir"):
            done = run_hydra_job(task, config, "hydra.run.dir", None, context)
    if done.status is JobStatus.FAILED:
        raise done._return_value  # `return_value` prints a line of Hydra's, too
    return done.return_value


def build_algorithm(*overrides: str) -> Algorithm:
    """See `grpocli.build_algorithm`."""
    config = compose(list(overrides))
    aggregate, limit = config.algorithm.aggregate, "rollout.max_completion_tokens"
    follows_run = "length" in aggregate and OmegaConf.is_interpolation(aggregate, "length")
    if follows_run and not any(one.startswith(limit) for one in overrides):
        said = "algorithm.aggregate.length is %d, %s of grpocli's default run, not of yours: give it, too"
        logger.warning(said, aggregate.length, limit)
    return cast("Algorithm", build(config.algorithm))


def save(config: DictConfig) -> str:
    """The config as YAML, resolved except for values from environment variables."""
    return OmegaConf.to_yaml(OmegaConf.create(without_environment(config)))


def sweep_folder(overrides: list[str]) -> Path | None:
    """The folder of a sweep's first run; None if Hydra will refuse the overrides."""
    from hydra.errors import HydraException
    from hydra.types import RunMode

    register_parts()
    with suppress(HydraException, OmegaConfBaseException), composer("train") as hydra:
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
