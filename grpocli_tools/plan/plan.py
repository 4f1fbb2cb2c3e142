"""The plan of a config: the model's size, its devices, the memory of each, and the work of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli_tools.plan.memory import Device, PlanInputs, devices
from grpocli_tools.plan.model_size import ModelSize, find_model_size
from grpocli_tools.plan.resources import DeviceOptions, find_resources
from grpocli_tools.plan.work import Work, work

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli_tools.plan.resources import Resources
    from grpocli_tools.plan.trace import MicroBatchShape, TracedMemory


TIGHT = 0.1
"""The share of a device's memory that should be left."""
COMPILED = 0.6
"""Activations that compiled layers keep over those of eager ones, where all weights train: 29.2 of 49.9 GiB for 0.5B on
an H100."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    dtype: of the computation. rows: the largest micro-batch, with completions of full length. micro_batches:
    micro-batches per update and process. inputs: of the formulas.
    """

    run: Run
    size: ModelSize
    resources: Resources
    dtype: str
    rows: MicroBatchShape
    micro_batches: int
    traced: TracedMemory
    devices: list[Device]
    work: Work
    inputs: PlanInputs

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    @property
    def is_tight(self) -> bool:
        """Whether it fits with little memory left; a GPU that vLLM fills on purpose does not count."""
        return self.fits and any(1 - TIGHT < device.peak / device.memory < 1 - 1e-6 for device in self.devices)


def load_libraries() -> None:
    """Import torch and transformers, which takes most of a plan's time."""
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401


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
    packed = run.train.packed and run.rollout.repetition_penalty == 1 and _takes_packed(run, size)
    rows, micro_batches = _micro_batch(run, resources, packed)
    traced = TracedMemory(0, 0, 0, 0)
    if trace_memory:
        stage("tracing a micro-batch")
        traced = trace(run, size, rows, getattr(torch, dtype)).shared_by(run.hardware.context_parallel)
    compiled = rows.flex and takes_compiled(run, resources.trainers, True, size.parameters, bool(size.experts))
    if compiled and not (run.train.gradient_checkpointing or run.model.lora.rank):
        traced = replace(traced, activations=int(COMPILED * traced.activations))
    itemsize, teachers = getattr(torch, dtype).itemsize, _teachers(run)
    inputs = PlanInputs(run, engine, size, resources, traced, packed, micro_batches, itemsize, teachers, compiled)
    found = devices(inputs)
    return Plan(run, size, resources, dtype, rows, micro_batches, traced, found, work(inputs, found), inputs)


def _teachers(run: Run) -> tuple[ModelSize, ...]:
    """The sizes of the models of `algorithm.kl.model`, from their own configs."""
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
    from grpocli_tools.plan.resources import device_kind

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


def _takes_packed(run: Run, size: ModelSize) -> bool:
    """Whether training would pack rows, which it tries with the model itself."""
    from grpocli.models.loading import PACKING
    from grpocli.models.shared_prompt_attention import supports

    return run.model.attention in PACKING and supports(size.config, run.rollout.longest_row)


def _micro_batch(run: Run, resources: Resources, packed: bool) -> tuple[MicroBatchShape, int]:
    """The largest micro-batch of a process, or of those that share it, and micro-batches per update, as in training."""
    from grpocli.models.loading import takes_flex
    from grpocli.training.packing import FlexPacked, Layout, Packed, Padded
    from grpocli.types import Row
    from grpocli_tools.plan.trace import MicroBatchShape

    rollout, train = run.rollout, run.train
    prompt, completion = rollout.max_prompt_tokens, rollout.max_completion_tokens
    groups = math.ceil(rollout.prompts_per_step / train.minibatches)
    prompts, ids = [[number] * prompt for number in range(groups)], [0] * completion
    rows = [
        Row(one, ids, ids, 0.0, number, []) for number, one in enumerate(prompts) for _ in range(rollout.group_size)
    ]
    flex = packed and resources.gpu and takes_flex(run.model.attention, resources.gpu)
    layout: type[Layout] = FlexPacked if flex else Packed if packed else Padded
    shared_by = run.hardware.context_parallel
    dealt = layout.deal(rows, max(1, resources.trainers // shared_by))
    shares = [layout.pack(share, train.micro_batch_tokens * shared_by) for share in dealt]
    largest = max((batch for share in shares for batch in share), key=layout.size)
    counts = Counter(row.group for row in largest)
    shape = MicroBatchShape(tuple(counts.values()), prompt, completion, packed, resources.gpu, flex)
    return shape, max(len(share) for share in shares)
