"""Keys to change where a run does not fit, each with what the plan would then be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.plan.place import GIB

if TYPE_CHECKING:
    from grpocli.plan.plan import Plan


def advice(plan: Plan, again: Callable[[list[str]], Plan]) -> Iterator[str]:
    """A line for each change that helps. again: the plan with further overrides."""
    before = {device.name: device.peak - device.memory for device in plan.devices}
    for change in candidates(plan):
        try:
            after = again(change)
        except ConfigError:  # it contradicts another key of this run
            continue
        missing = {device.name: device.peak - device.memory for device in after.devices}
        if after.fits or any(value < before.get(name, value) for name, value in missing.items()):
            yield f"{' '.join(change)}: {outcome(after)}"


def outcome(plan: Plan) -> str:
    """`fits: 31.0 of 80.0 GiB on a training GPU`."""
    peaks = ", ".join(f"{d.peak / GIB:,.1f} of {d.memory / GIB:,.1f} GiB ({d.name})" for d in plan.devices)
    return f"{'fits' if plan.fits else 'does not fit yet'}, {peaks}"


def candidates(plan: Plan) -> Iterator[list[str]]:
    """Changes to try one at a time, then the harmless ones together: those that leave what is learnt alone."""
    run, place = plan.run, plan.place
    length = run.rollout.longest_row
    harmless = []
    if not run.train.gradient_checkpointing:
        harmless.append("train.gradient_checkpointing=true")
    if plan.rows.rows > 1:
        harmless.append(f"train.micro_batch_tokens={max(length, plan.rows.tokens // 2)}")
    rows, group = getattr(run.engine, "max_rows", 0), run.rollout.group_size
    if rows > group:
        harmless.append(f"engine.max_rows={max(group, rows // 4)}")
    if place.trainers > 1 and run.hardware.parallel in ("ddp", "zero2"):
        harmless.append("hardware.parallel=fsdp2")
    yield from ([change] for change in harmless)
    if harmless:
        least = [c if "micro_batch" not in c else f"train.micro_batch_tokens={length}" for c in harmless]
        yield least
    if place.servers and place.gpu:
        yield [f"engine.tensor_parallel={2 * place.tensor_parallel}"]
        if place.shared:
            yield ["engine.gpu_memory_utilization=0.3"]
    if place.gpu and not plan.run.model.lora.rank:
        yield ["model.lora.rank=16", *harmless]
