"""The runs of a multirun: written to folders, submitted as one batch script, and waited for.

`grpocli train resume=FOLDER` starts each of them.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from grpocli.composition.compose import build_run, resolve_hydra, save, write_record
from grpocli.config.environment import mode_of
from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli.runs.run_dir import RunDir
from hydra_plugins.grpocli_slurm import _cluster
from hydra_plugins.grpocli_slurm._script import BatchScript, JobNodes, same_resources
from hydra_plugins.grpocli_slurm.options import Options
from hydra_plugins.grpocli_slurm.options import options as options_of

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


def launch(
    values: Mapping[str, Any],
    context: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Hydra's `Launcher.launch`. values: the keys of `hydra.launcher`. A run returns its `eval/accuracy` or its error.

    Raises ConfigError before anything is submitted if a run cannot work.
    """
    sweep, options = Path(str(config.hydra.sweep.dir)).resolve(), options_of(values)
    runs = prepare(context, config, job_overrides, first)
    resources = same_resources([JobNodes.of(run.run, options) for run in runs])
    if not options.dry_run:
        _cluster.check()
    returns = _write_runs(context, runs)
    batch = _write_batch(options, resources, sweep, _config_dir(config), runs)
    if options.dry_run:
        print(batch.text())
        print(f"nothing was submitted; `sbatch {shlex.quote(str(batch.script))}` submits it")
        return [_with_result(done, None) for done in returns]
    number = _submit(batch, runs)
    _print_submitted(number, batch, runs)
    if not options.wait:
        return [_with_result(done, None) for done in returns]
    results = _cluster.JobMonitor(number, [run.folder for run in runs], options.wait_at_most).results()
    if len(runs) > 1:
        print(f"`grpocli compare {shlex.quote(str(sweep))}` compares them", flush=True)
    return [_with_result(done, result) for done, result in zip(returns, results, strict=True)]


def _submit(batch: BatchScript, runs: Sequence[SweepRun]) -> str:
    """Submit the batch script and return the job's id. If SLURM refuses it, remove the runs' folders."""
    try:
        return _cluster.submit(str(batch.script), batch.options.partition)
    except ConfigError:
        for run in runs:
            RunDir(run.folder).remove_unstarted()
        raise


def _write_batch(
    options: Options, resources: JobNodes, sweep: Path, configs: str | None, runs: Sequence[SweepRun]
) -> BatchScript:
    """Write the script, and for an array the list of folders. Later batches of a sweep get other file names."""
    first = runs[0].number
    batch = BatchScript(
        options=options,
        resources=resources,
        folder=sweep,
        runs=[run.folder for run in runs],
        name="job" if first == 0 else f"job_{first}",
        config_dir=configs,
    )
    if len(runs) > 1:
        write_atomic(batch.run_list, "".join(f"{folder}\n" for folder in batch.runs))
    write_atomic(batch.script, batch.text(), mode=0o700)
    return batch


def _print_submitted(number: str, batch: BatchScript, runs: Sequence[SweepRun]) -> None:
    print(f"submitted job {number}: {batch.script}")
    common = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    for i, run in enumerate(runs):
        name = f"{number}_{i}" if len(runs) > 1 else number
        print(" ".join([f"  {name}  {run.folder} ", *(o for o in run.overrides if o not in common)]))
    print(f"  log     {batch.folder}/slurm-{number}{'_*' if len(runs) > 1 else ''}.log; slurm.log in a run's folder")
    print(f"  cancel  scancel {number}", flush=True)


def _with_result(done: JobReturn, result: float | Exception | None) -> JobReturn:
    done.status = JobStatus.FAILED if isinstance(result, Exception) else JobStatus.COMPLETED
    done.return_value = result
    return done


def prepare(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> list[SweepRun]:
    """Compose and check every run. Raises ConfigError if one cannot work. Nothing is written."""
    setup_globals()
    return [_compose_run(context, config, list(given), first + i) for i, given in enumerate(job_overrides)]


def _write_runs(context: HydraContext, runs: Sequence[SweepRun]) -> list[JobReturn]:
    """Make the runs' folders. Raises ConfigError if a folder already has a run."""
    for run in runs:
        RunDir(run.folder).check_free()
    for run in runs:
        RunDir(run.folder).check_writable(resuming=False)
    return [_write_run(context, run) for run in runs]


def _compose_run(context: HydraContext, config: DictConfig, given: list[str], number: int) -> SweepRun:
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


def _write_run(context: HydraContext, run: SweepRun) -> JobReturn:
    """Write the run's files within a Hydra job, as for a run on this machine."""

    def write(config: DictConfig) -> None:
        config.overrides = list(run.overrides)
        write_record(run.folder, config)
        text = save(config)
        write_atomic(RunDir(run.folder).config, text, mode_of(text))

    done = run_job(write, run.config, "hydra.sweep.dir", "hydra.sweep.subdir", context, configure_logging=False)
    _ = done.return_value  # raises the error of the job
    return done


def _config_dir(config: DictConfig) -> str | None:
    """The folder given with `--config-dir`, which a resume needs again; None without it."""
    given = [source.path for source in config.hydra.runtime.config_sources if source.provider == "command-line"]
    return str(Path(given[0]).resolve()) if given else None
