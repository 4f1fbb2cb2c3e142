"""The jobs of a multirun: written, submitted as one batch script, and waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig

from grpocli.errors import ConfigError
from grpocli.files import write_atomic
from grpocli.launch.slurm import cluster
from grpocli.launch.slurm.options import Options
from grpocli.launch.slurm.options import options as options_of
from grpocli.launch.slurm.prepare import Job, config_dir, prepared, write
from grpocli.launch.slurm.script import Batch, Shape, one_shape
from grpocli.launch.slurm.wait import Waiting
from grpocli.tracking.run_dir import RunDir

OF_A_START = re.compile(r"multirun\.yaml|job(_\d+)?\.(sh|runs)")
"""What a sweep's folder holds before its runs do."""


def launch(
    values: Mapping[str, Any],
    context: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Hydra's `Launcher.launch`, with the keys of `hydra.launcher`. A run's value is its `eval/accuracy`, or the error
    that ended it.

    Raises ConfigError, with nothing submitted, for what cannot work.
    """
    sweep = Path(str(config.hydra.sweep.dir)).resolve()
    with _tidied(sweep):
        options = options_of(values)
        _check_sweeper(options, str(config.hydra.sweeper.get("_target_")))
        jobs = prepared(context, config, job_overrides, first)
        shape = one_shape([Shape.of(job.run, options) for job in jobs])
        if not options.dry_run:
            cluster.check(options, shape.nodes)
        returns = write(context, jobs)
        batch = _written(options, shape, sweep, config_dir(config), jobs)
        if options.dry_run:
            print(batch.text())
            print(f"nothing was submitted; `sbatch {batch.script}` does it")
            return [_of(done, None) for done in returns]
        number = _submit(batch, jobs)
    _tell(number, batch, jobs)
    if not options.wait:
        return [_of(done, None) for done in returns]
    results = Waiting(number, jobs, options.wait_at_most).results()
    if len(jobs) > 1:
        print(f"`grpocli compare {sweep}` compares them", flush=True)
    return [_of(done, result) for done, result in zip(returns, results, strict=True)]


@contextmanager
def _tidied(sweep: Path) -> Iterator[None]:
    """Where nothing is submitted, the folder that Hydra has made for the sweep goes again, if no run is in it."""
    try:
        yield
    except ConfigError:
        left = list(sweep.iterdir()) if sweep.is_dir() else []
        if left and all(path.is_file() and OF_A_START.fullmatch(path.name) for path in left):
            for path in left:
                path.unlink()
            if sweep != Path.cwd():
                sweep.rmdir()
        raise


def _submit(batch: Batch, jobs: Sequence[Job]) -> str:
    """The job's id. Where SLURM refuses, the folders of the runs that never began go again."""
    try:
        return cluster.submit(str(batch.script), batch.options.partition)
    except ConfigError:
        for job in jobs:
            RunDir(job.folder).forget()
        raise


def _check_sweeper(options: Options, sweeper: str) -> None:
    """A sweeper that chooses by results needs them."""
    if sweeper.endswith("BasicSweeper"):
        return
    for key in ("dry_run",) if options.dry_run else ("wait",) if not options.wait else ():
        value = str(getattr(options, key)).lower()
        raise ConfigError(
            f"{sweeper.rpartition('.')[2]} waits for each run's value", key=f"hydra.launcher.{key}", value=value
        )


def _written(options: Options, shape: Shape, sweep: Path, configs: str | None, jobs: Sequence[Job]) -> Batch:
    """The script, and the list of folders that an array needs. Later batches of a sweep have names of their own."""
    first = jobs[0].number
    batch = Batch(
        options=options,
        shape=shape,
        folder=sweep,
        runs=[job.folder for job in jobs],
        name="job" if first == 0 else f"job_{first}",
        config_dir=configs,
    )
    if len(jobs) > 1:
        write_atomic(batch.run_list, "".join(f"{folder}\n" for folder in batch.runs))
    write_atomic(batch.script, batch.text(), mode=0o700)
    return batch


def _tell(number: str, batch: Batch, jobs: Sequence[Job]) -> None:
    print(f"submitted job {number}: {batch.script}")
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    for i, job in enumerate(jobs):
        name = f"{number}_{i}" if len(jobs) > 1 else number
        print(" ".join([f"  {name}  {job.folder} ", *(o for o in job.overrides if o not in common)]))
    print(f"  log     {batch.folder}/slurm-{number}{'_*' if len(jobs) > 1 else ''}.log; slurm.log in a run's folder")
    print(f"  cancel  scancel {number}", flush=True)


def _of(done: JobReturn, result: float | Exception | None) -> JobReturn:
    done.status = JobStatus.FAILED if isinstance(result, Exception) else JobStatus.COMPLETED
    done.return_value = result
    return done
