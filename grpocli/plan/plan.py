"""A config's plan: the model's sizes, where it runs, the memory of every device, and the work of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.plan.memory import Device, PlanInputs, devices
from grpocli.plan.placement import DeviceOptions, find_placement
from grpocli.plan.shape import Shape, find_shape
from grpocli.plan.work import Work, work

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.plan.placement import Placement
    from grpocli.plan.trace import MicroBatchShape, Traced


@dataclass(frozen=True, slots=True)
class Plan:
    """dtype: what the model computes in. rows: a micro-batch of completions of full length; micro_batches: of them in
    an update of one process."""

    run: Run
    shape: Shape
    place: Placement
    dtype: str
    rows: MicroBatchShape
    micro_batches: int
    traced: Traced
    devices: list[Device]
    work: Work

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)


def load_libraries() -> None:
    """Import torch and transformers, which takes most of a plan's time."""
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401


def make_plan(run: Run, asked: DeviceOptions, stage: Callable[[str], None] = lambda text: None) -> Plan:
    """Raises ConfigError where the model's config cannot be had or torch cannot run it. stage: called with the name of
    each stage."""
    import torch

    from grpocli.plan.trace import trace

    engine = _engine(run)
    place = find_placement(run, engine, asked)
    stage("reading the model's sizes")
    shape = find_shape(run.model)
    dtype = _dtype(run, shape, place)
    packed = run.train.packed and run.rollout.repetition_penalty == 1 and _takes_packed(run, shape)
    rows, micro_batches = _micro_batch(run, place, packed)
    stage("tracing a micro-batch")
    traced = trace(run, shape, rows, getattr(torch, dtype))
    needs = PlanInputs(run, engine, shape, place, traced, packed, micro_batches, getattr(torch, dtype).itemsize)
    found = devices(needs)
    return Plan(run, shape, place, dtype, rows, micro_batches, traced, found, work(needs, found))


def _engine(run: Run) -> Any:
    """What engine=auto would be on the devices that the plan is for, which need not be here."""
    from grpocli.plan.placement import device_kind
    from grpocli.rollout.auto import Auto
    from grpocli.rollout.transformers_engine import Transformers
    from grpocli.rollout.vllm.options import Vllm

    if not isinstance(run.engine, Auto):
        return run.engine
    return Vllm(gpu_memory_utilization=0.4) if device_kind(run) == "cuda" else Transformers()


def _dtype(run: Run, shape: Shape, place: Placement) -> str:
    """As `grpocli.models.loading` chooses it there."""
    from grpocli.models.loading import LARGE, cpu_has_bfloat16

    if run.model.dtype != "auto":
        return str(run.model.dtype)
    fast = place.gpu or (cpu_has_bfloat16(Path("/proc/cpuinfo")) and shape.parameters > LARGE)
    return "bfloat16" if fast else "float32"


def _takes_packed(run: Run, shape: Shape) -> bool:
    """Training tries it, too."""
    from grpocli.models.attention import knows

    return run.model.attn_implementation in (None, "sdpa") and knows(shape.config, run.rollout.longest_row)


def _micro_batch(run: Run, place: Placement, packed: bool) -> tuple[MicroBatchShape, int]:
    """The largest micro-batch of a process, and how many it has in an update: dealt and packed as training does it."""
    from grpocli.plan.trace import MicroBatchShape
    from grpocli.training.packing import Layout, Packed, Padded
    from grpocli.types import Row

    rollout, train = run.rollout, run.train
    prompt, completion = rollout.max_prompt_tokens, rollout.max_completion_tokens
    groups = math.ceil(rollout.prompts_per_step / train.minibatches)
    prompts, ids = [[number] * prompt for number in range(groups)], [0] * completion
    rows = [
        Row(one, ids, ids, 0.0, number, []) for number, one in enumerate(prompts) for _ in range(rollout.group_size)
    ]
    layout: type[Layout] = Packed if packed else Padded
    shares = [layout.pack(share, train.micro_batch_tokens) for share in layout.deal(rows, place.trainers)]
    largest = max((batch for share in shares for batch in share), key=layout.size)
    counts = Counter(row.group for row in largest)
    return MicroBatchShape(tuple(counts.values()), prompt, completion, packed, place.gpu), max(
        len(share) for share in shares
    )
