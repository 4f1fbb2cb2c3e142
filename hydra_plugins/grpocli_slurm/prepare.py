"""The runs of a multirun, each in a folder from which `grpocli train resume=FOLDER` starts it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn, filter_overrides, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from grpocli.composition.compose import build_run, mode_of, resolve_hydra, save, write_record
from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli.runs.run_dir import RunDir

if TYPE_CHECKING:
    from grpocli.config.schema import Run

UNQUOTABLE = "'\"\\\n"
"""Characters that do not survive a shell, SLURM and Hydra's grammar together."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a multirun."""

    number: int
    overrides: Sequence[str]
    config: DictConfig
    run: Run
    folder: Path


def prepared(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> list[SweepRun]:
    """Compose and check every run. Raises ConfigError if one cannot work. Nothing is written."""
    setup_globals()
    return [_composed(context, config, list(given), first + i) for i, given in enumerate(job_overrides)]


def write(context: HydraContext, runs: Sequence[SweepRun]) -> list[JobReturn]:
    """Make the runs' folders. Raises ConfigError if a folder already has a run."""
    for run in runs:
        RunDir(run.folder).check_free()
    for run in runs:
        RunDir(run.folder).check_writable(resuming=False)
    return [_written(context, run) for run in runs]


def _composed(context: HydraContext, config: DictConfig, given: list[str], number: int) -> SweepRun:
    composed = context.config_loader.load_sweep_config(config, given)
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number
    resolve_hydra(composed)
    folder = Path(str(composed.hydra.sweep.dir), str(composed.hydra.sweep.subdir)).resolve()
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    if set(str(folder)) & set(UNQUOTABLE):
        raise ConfigError(
            "its quotes, backslashes and line breaks do not reach the nodes", key="hydra.sweep.dir", value=folder
        )
    overrides = filter_overrides(given)
    try:
        run = build_run(task)
    except ConfigError as error:
        raise error.with_note(f"job {number}: {' '.join(overrides)}; nothing was submitted") from error
    return SweepRun(number, overrides, composed, run, folder)


def _written(context: HydraContext, run: SweepRun) -> JobReturn:
    """Write the run's files within a Hydra job, as for a run on this machine."""

    def write(config: DictConfig) -> None:
        config.overrides = list(run.overrides)
        write_record(run.folder, config)
        text = save(config)
        write_atomic(RunDir(run.folder).config, text, mode_of(text))

    done = run_job(write, run.config, "hydra.sweep.dir", "hydra.sweep.subdir", context, configure_logging=False)
    _ = done.return_value  # raises the error of the job
    return done


def config_dir(config: DictConfig) -> str | None:
    """The folder given with `--config-dir`, which a resume needs again; None without it."""
    given = [source.path for source in config.hydra.runtime.config_sources if source.provider == "command-line"]
    return str(Path(given[0]).resolve()) if given else None
