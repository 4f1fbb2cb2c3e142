"""The plan of a config: the model's size, its devices, the memory of each, and the work of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli_tools.plan.memory import Device, PlanInputs, devices
from grpocli_tools.plan.model_size import ModelSize, find_model_size
from grpocli_tools.plan.resources import DeviceOptions, Resources, device_kind, find_resources
from grpocli_tools.plan.times import Work, work

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli_tools.plan.trace import MicroBatchShape

TIGHT = 0.1
"""The share of a device's memory that should be left."""
COMPILED = 0.6
"""Activations that compiled layers keep over those of eager ones, where all weights train: 29.2 of 49.9 GiB for 0.5B on
an H100."""


@dataclass(frozen=True)
class Plan(PlanInputs):
    """The plan of a run: its parts, and what follows from them."""

    @cached_property
    def devices(self) -> list[Device]:
        return devices(self)

    @cached_property
    def work(self) -> Work:
        return work(self)

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    @property
    def is_tight(self) -> bool:
        """Whether it fits with little memory left; a GPU that vLLM fills on purpose does not count."""
        return self.fits and any(1 - TIGHT < device.peak / device.memory < 1 - 1e-6 for device in self.devices)


def make_plan(
    run: Run,
    options: DeviceOptions,
    stage: Callable[[str], None] = lambda text: None,
    trace_memory: bool = True,
) -> Plan:
    """The plan of a run. stage: called with the name of each stage. trace_memory: false for times alone.

    Raises ConfigError if the model's config is not available or transformers cannot build it.
    """
    import torch

    from grpocli.training.trials import takes_compiled
    from grpocli_tools.plan.trace import TracedMemory, trace

    engine = _engine(run, options)
    resources = find_resources(run, engine, options)
    stage("reading the model's sizes")
    size = find_model_size(run.model)
    dtype = _dtype(run, size, resources)
    rows, micro_batches = _micro_batch(run, size, resources)
    traced = TracedMemory()
    if trace_memory:
        stage("tracing a micro-batch")
        traced = trace(run, size, rows, getattr(torch, dtype)).shared_by(run.hardware.context_parallel)
    compiled = rows.flex and takes_compiled(run, resources.trainers, True, size.parameters, bool(size.experts))
    if compiled and not (run.train.gradient_checkpointing or run.model.lora.rank):
        traced = replace(traced, activations=int(COMPILED * traced.activations))
    return Plan(
        run, engine, size, resources, dtype, rows, micro_batches, traced, teachers=_teachers(run), compiled=compiled
    )


def _teachers(run: Run) -> tuple[ModelSize, ...]:
    from grpocli.algorithm.kl import has_teacher
    from grpocli.models.teacher import teachers_of

    sizes = []
    for teacher in teachers_of(run.algorithm.kl, run.model) if has_teacher(run.algorithm.kl) else ():
        with teacher.errors():
            sizes.append(find_model_size(teacher.part))
    return tuple(sizes)


def _engine(run: Run, options: DeviceOptions) -> Any:
    """The run's engine, with engine=auto resolved for the planned devices, which this machine may lack."""
    from grpocli.hardware import visible_gpus
    from grpocli.rollout.transformers_engine import VLLM_START, AutoEngine, Transformers, seconds_by_transformers
    from grpocli.rollout.vllm.engine_parts import Vllm

    if not isinstance(run.engine, AutoEngine):
        return run.engine
    short = (options.devices or len(visible_gpus())) <= 1 and seconds_by_transformers(run) < VLLM_START
    return Vllm() if device_kind(run) == "cuda" and not short else Transformers()


def _dtype(run: Run, size: ModelSize, resources: Resources) -> str:
    """The dtype that `grpocli.models.loading` would choose on the planned devices."""
    from grpocli.models.loading import LARGE, cpu_has_bfloat16

    if run.model.dtype != "auto":
        return str(run.model.dtype)
    fast = resources.gpu or (cpu_has_bfloat16(Path("/proc/cpuinfo")) and size.parameters > LARGE)
    return resources.dtype if fast else "float32"


def _micro_batch(run: Run, size: ModelSize, resources: Resources) -> tuple[MicroBatchShape, int]:
    """The largest micro-batch of a process, or of those that share it, and micro-batches per update, as in training."""
    from grpocli.models.loading import PACKING, takes_flex
    from grpocli.models.shared_prompt_attention import supports
    from grpocli.training.packing import FlexPacked, Layout, Packed, Padded
    from grpocli.types import Row
    from grpocli_tools.plan.trace import MicroBatchShape

    rollout, train, attention = run.rollout, run.train, run.model.attention
    fits = attention in PACKING and supports(size.config, rollout.longest_row)  # training tries the model itself
    packed = train.packed and rollout.repetition_penalty == 1 and fits
    flex = packed and resources.gpu and takes_flex(attention, resources.gpu)
    layout: type[Layout] = FlexPacked if flex else Packed if packed else Padded
    prompt, completion = rollout.max_prompt_tokens, rollout.max_completion_tokens
    groups, ids = math.ceil(rollout.prompts_per_step / train.minibatches), [0] * completion
    rows = [
        Row(prompt_ids, ids, ids, 0.0, number, [])
        for number, prompt_ids in enumerate([number] * prompt for number in range(groups))
        for _ in range(rollout.group_size)
    ]
    shared_by = run.hardware.context_parallel
    dealt = layout.deal(rows, max(1, resources.trainers // shared_by))
    shares = [layout.pack(share, train.micro_batch_tokens * shared_by) for share in dealt]
    largest = max((batch for share in shares for batch in share), key=layout.size)
    counts = Counter(row.group for row in largest)
    shape = MicroBatchShape(tuple(counts.values()), prompt, completion, packed, resources.gpu, flex)
    return shape, max(len(share) for share in shares)
