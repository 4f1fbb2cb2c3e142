"""The first lines of a run: what trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from grpocli.config.choices import choice_of
from grpocli.rollout.auto import chosen
from grpocli.tasks.mixture import tasks_of

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.hardware.devices import Devices
    from grpocli.rollout.engine import EngineJob


def opening_lines(run: Run, job: EngineJob, devices: Devices, choices: Mapping[str, str]) -> list[str]:
    """Model, dtype, device, task, rewards, algorithm and engine. choices: {config group: what was chosen}."""
    choice = choices.get("model", job.model_path)
    model = job.model_path if choice == job.model_path else f"{choice} ({job.model_path})"
    gpus = len(devices.train)
    where = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "the CPU"
    engine = choice_of("engine", chosen(run.engine))
    return [
        f"model   {model}, in {job.dtype} on {where}",
        f"task    {', '.join(tasks_of(run.task))}, scored by {', '.join(run.reward)}",
        f"method  algorithm={choices.get('algorithm', '?')}, engine={engine}",
    ]
