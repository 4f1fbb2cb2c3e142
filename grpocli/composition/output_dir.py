"""The output folder that Hydra chooses for a run, and Hydra's record of the overrides in it.

The folder is known before Hydra starts, because Hydra makes its folders before it calls the task function.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.compose import mode_of, register_parts
from grpocli.composition.hydra_sources import cleared_hydra, conf_dir
from grpocli.files import write_atomic

RECORD = ".hydra"


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
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    files = {"config": config, "hydra": OmegaConf.create({"hydra": hydra}), "overrides": hydra.overrides.task}
    (folder / RECORD).mkdir(exist_ok=True)
    for name, content in files.items():
        text = OmegaConf.to_yaml(content)
        write_atomic(folder / RECORD / f"{name}.yaml", text, mode_of(text))
