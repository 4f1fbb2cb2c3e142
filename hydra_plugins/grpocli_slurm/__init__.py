"""`hydra/launcher=slurm`, a launcher for Hydra.

Hydra finds launchers only in the namespace package `hydra_plugins`. At the start of every app it imports the modules
there, but for those whose name begins with `_`, which are imported when a job is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.grpocli_slurm.options import register


class SlurmLauncher(Launcher):  # type: ignore[misc] # mypy sees no types of hydra
    """Submits the runs of a multirun to SLURM."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from hydra_plugins.grpocli_slurm._launcher import launch

        return launch(self._options, self._context, self._config, job_overrides, initial_job_idx)


register(f"{SlurmLauncher.__module__}.{SlurmLauncher.__qualname__}")
