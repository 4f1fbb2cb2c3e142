"""Two processes that share each micro-batch, started by tests/training/test_context_parallel.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models.architectures import architecture
from training import updating
from training.test_router_balance import ALONE, updated
from training.test_teachers import SAMPLING, rows
from transformers import AutoModelForCausalLM

from grpocli.config.schema import Train
from grpocli.distributed.world import World
from grpocli.hardware import Single
from grpocli.processes.threads import end_process
from grpocli.training import trials
from grpocli.training.optim import AdamW
from grpocli.training.packing import MicroBatch, Packed
from grpocli.training.teachers import LoadedTeacher, Teachers
from grpocli.types import Row, Sampling

MIXTURE = "mixture of experts"
KINDS = ("flex", "compiled")
"""The names of updates of `grpo` with another attention, and with compiled layers."""
RESUMED, TAUGHT = "resumed", "taught"


@contextmanager
def counted(weights: Iterator[torch.Tensor]) -> Iterator[dict[int, int]]:
    """A block whose dictionary has the bytes of each memory that autograd keeps beside the weights."""
    known, kept = {weight.untyped_storage().data_ptr() for weight in weights}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def kept_bytes(world: World, folder: Path) -> dict[str, int]:
    """The bytes of activations of a micro-batch in this process, alone and shared."""
    policy, _ = updating.loaded(world, folder / "model", updating.descent)
    policy.packs = updating.pack(policy, None, world)
    rows = [Row([2, 5, 6, 7], [7 + k] * 60, [1] * 60, 1.0, 0, [-3.0] * 60) for k in range(2)]
    found = {}
    for layout in (Packed, policy.layout(Sampling(60))):
        batch = MicroBatch.build(rows, world.device, layout)
        with counted(policy.model.parameters()) as kept:
            scores = policy.scores(batch, Sampling(60))
        found["whole" if layout is Packed else "shared"] = sum(kept.values())
        scores.logp.sum().backward()
    return found


def taught(world: World, folder: Path) -> dict[str, Any]:
    """An update with a teacher for each of two tasks; then one without rows for one of them."""
    policy, optimizer = updating.loaded(world, folder / "model", updating.descent)
    teachers = Teachers([])
    for task, factor in (("a", 0.5), ("b", 1.5)):
        with world.parallel.loading():
            model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
            for weight in model.parameters():
                weight.data *= factor
        teachers.loaded.append(LoadedTeacher(model, policy, (task,)))
    assert updating.pack(policy, teachers, world)
    overrides = "algorithm=opd", "algorithm/correction=none"
    given = {"policy": policy, "reference": teachers, "optim": AdamW(lr=0.1, max_grad_norm=0.0), "sampling": SAMPLING}
    updater = updating.updater_for(None, world, *overrides, **given)
    updater.optimizer, updater.train = optimizer, Train(micro_batch_tokens=28)
    metrics = updating.train_step(updater, rows(), 3)
    others = [row for row in rows() if row.task == "b"]
    later = updating.train_step(updater, others, 3, step=2)
    return {"metrics": metrics, "later": later, "weights": updating.whole(policy)}


def main(folder: Path, parallel: str, names: list[str]) -> None:
    world = World(Single(device="cpu", parallel=parallel, context_parallel=2, timeout=120))
    assert world.context_parallel
    results: dict[str, Any] = {}
    for name in names:
        if name == MIXTURE:
            results[name] = updated(architecture("qwen3_moe").build(), world, *ALONE, packed=True, tokens=60)
        elif name in KINDS:
            results[name] = updating.descended(world, folder, "grpo", kind=name)
        elif name == RESUMED:
            results[name] = updating.went_on(world, folder, folder / "saved_1", folder / f"saved_1_to_{parallel}")
        elif name == TAUGHT:
            results[name] = taught(world, folder)
        else:
            results[name] = updating.descended(world, folder, name)
    if parallel == "ddp":
        results["bytes"] = kept_bytes(world, folder)
    torch.save(results, folder / f"shared_{world.rank}_{parallel}.pt")
    if parallel == "fsdp2":
        world.close()


if __name__ == "__main__":
    trials.COMPILE_OPTIONS |= {"backend": "eager"}  # graphs, without a compiler for their kernels
    for chosen in updating.SHARED:
        main(Path(sys.argv[1]), chosen, [name for name in sys.argv[2:] if name != MIXTURE or chosen == "ddp"])
    end_process(0)  # as a trainer does
