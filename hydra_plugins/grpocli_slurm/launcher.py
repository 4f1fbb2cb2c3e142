"""The runs of a multirun: written to folders, submitted as one batch script, and waited for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig

from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli.runs.run_dir import RunDir
from hydra_plugins.grpocli_slurm import cluster
from hydra_plugins.grpocli_slurm.monitor import JobMonitor
from hydra_plugins.grpocli_slurm.options import Options
from hydra_plugins.grpocli_slurm.options import options as options_of
from hydra_plugins.grpocli_slurm.prepare import SweepRun, config_dir, prepared, write
from hydra_plugins.grpocli_slurm.script import BatchScript, JobNodes, same_resources


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
    runs = prepared(context, config, job_overrides, first)
    resources = same_resources([JobNodes.of(run.run, options) for run in runs])
    if not options.dry_run:
        cluster.check()
    returns = write(context, runs)
    batch = _written(options, resources, sweep, config_dir(config), runs)
    if options.dry_run:
        print(batch.text())
        print(f"nothing was submitted; `sbatch {shlex.quote(str(batch.script))}` submits it")
        return [_with_result(done, None) for done in returns]
    number = _submit(batch, runs)
    _print_submitted(number, batch, runs)
    if not options.wait:
        return [_with_result(done, None) for done in returns]
    results = JobMonitor(number, runs, options.wait_at_most).results()
    if len(runs) > 1:
        print(f"`grpocli compare {shlex.quote(str(sweep))}` compares them", flush=True)
    return [_with_result(done, result) for done, result in zip(returns, results, strict=True)]


def _submit(batch: BatchScript, runs: Sequence[SweepRun]) -> str:
    """Submit the batch script and return the job's id. If SLURM refuses it, remove the runs' folders."""
    try:
        return cluster.submit(str(batch.script), batch.options.partition)
    except ConfigError:
        for run in runs:
            RunDir(run.folder).remove_unstarted()
        raise


def _written(
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
