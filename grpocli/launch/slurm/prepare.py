"""From the overrides of a multirun to folders in which `grpocli train resume=FOLDER` starts from the beginning."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn, filter_overrides, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli.launch.compose import build_run, mode_of, save
from grpocli.launch.output_dir import write_record
from grpocli.tracking.run_dir import RunDir

if TYPE_CHECKING:
    from grpocli.config.schema import Run

UNQUOTABLE = "'\"\\\n"
"""Would have to pass a shell, SLURM and Hydra's grammar."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a multirun."""

    number: int
    overrides: Sequence[str]
    config: DictConfig
    run: Run
    folder: Path


def prepared(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> list[Job]:
    """Compose and check every job. Raises ConfigError if one of them cannot work; nothing is written."""
    setup_globals()
    return [_composed(context, config, list(given), first + i) for i, given in enumerate(job_overrides)]


def write(context: HydraContext, jobs: Sequence[Job]) -> list[JobReturn]:
    """Make the jobs' folders. Raises ConfigError where a run is in one already."""
    for job in jobs:
        RunDir(job.folder).check_free()
    for job in jobs:
        RunDir(job.folder).check_writable(resuming=False)
    return [_written(context, job) for job in jobs]


def _composed(context: HydraContext, config: DictConfig, given: list[str], number: int) -> Job:
    composed = context.config_loader.load_sweep_config(config, given)
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number
    folder = Path(str(composed.hydra.sweep.dir), str(composed.hydra.sweep.subdir)).resolve()
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    if set(str(folder)) & set(UNQUOTABLE):
        raise ConfigError(
            "quotes, backslashes and line breaks do not get to the nodes", key="hydra.sweep.dir", value=folder
        )
    overrides = filter_overrides(given)
    try:
        run = build_run(task)
    except ConfigError as error:
        raise ConfigError(f"{error} (job {number}: {' '.join(overrides)}; nothing was submitted)") from error
    return Job(number, overrides, composed, run, folder)


def _written(context: HydraContext, job: Job) -> JobReturn:
    """As Hydra does it for a job that runs here."""

    def write(config: DictConfig) -> None:
        config.overrides = list(job.overrides)
        write_record(job.folder, config)
        text = save(config)
        write_atomic(RunDir(job.folder).config, text, mode_of(text))

    done = run_job(write, job.config, "hydra.sweep.dir", "hydra.sweep.subdir", context, configure_logging=False)
    _ = done.return_value  # raises what went wrong
    return done


def config_dir(config: DictConfig) -> str | None:
    """The folder given with `--config-dir`, which a resume needs again."""
    given = [source.path for source in config.hydra.runtime.config_sources if source.provider == "command-line"]
    return str(Path(given[0]).resolve()) if given else None
