"""A config's plan: the model's sizes, where it runs, the memory of every device, and the work of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.budget.memory import Device, Needs, devices
from grpocli.budget.place import Asked, find_place
from grpocli.budget.shape import Shape, find_shape
from grpocli.budget.work import Work, work

if TYPE_CHECKING:
    from grpocli.budget.place import Place
    from grpocli.budget.trace import Rows, Traced
    from grpocli.config.schema import Run


@dataclass(frozen=True, slots=True)
class Plan:
    """dtype: what the model computes in. rows: a micro-batch of completions of full length; micro_batches: of them in
    an update of one process."""

    run: Run
    shape: Shape
    place: Place
    dtype: str
    rows: Rows
    micro_batches: int
    traced: Traced
    devices: list[Device]
    work: Work

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)


def make_plan(run: Run, asked: Asked) -> Plan:
    """Raises ConfigError where the model's config cannot be had or torch cannot run it."""
    import torch

    from grpocli.budget.trace import trace

    engine = _engine(run)
    place = find_place(run, engine, asked)
    shape = find_shape(run.model)
    dtype = _dtype(run, shape, place)
    rows, micro_batches = _micro_batch(run, place)
    traced = trace(run, shape, rows, getattr(torch, dtype))
    needs = Needs(run, engine, shape, place, traced, micro_batches, getattr(torch, dtype).itemsize)
    found = devices(needs)
    return Plan(run, shape, place, dtype, rows, micro_batches, traced, found, work(needs, found))


def _engine(run: Run) -> Any:
    """What engine=auto would be on the devices that the plan is for, which need not be here."""
    from grpocli.budget.place import device_kind
    from grpocli.rollout.auto import Auto
    from grpocli.rollout.transformers_engine import Transformers
    from grpocli.rollout.vllm.options import Vllm

    if not isinstance(run.engine, Auto):
        return run.engine
    return Vllm(gpu_memory_utilization=0.4) if device_kind(run) == "cuda" else Transformers()


def _dtype(run: Run, shape: Shape, place: Place) -> str:
    """As `grpocli.training.dtype` chooses it there."""
    from grpocli.training.dtype import LARGE, cpu_has_bfloat16

    if run.model.dtype != "auto":
        return str(run.model.dtype)
    fast = place.gpu or (cpu_has_bfloat16(Path("/proc/cpuinfo")) and shape.parameters > LARGE)
    return "bfloat16" if fast else "float32"


def _micro_batch(run: Run, place: Place) -> tuple[Rows, int]:
    """The largest micro-batch of a process, and how many it has in an update."""
    from grpocli.budget.trace import Rows

    rollout, train = run.rollout, run.train
    length = rollout.max_prompt_tokens + rollout.max_completion_tokens
    groups = math.ceil(rollout.prompts_per_step / train.minibatches)
    mine = math.ceil(groups * rollout.group_size / place.trainers)
    rows = min(mine, max(1, train.micro_batch_tokens // length))
    return Rows(rows, rollout.max_prompt_tokens, rollout.max_completion_tokens), math.ceil(mine / rows)
