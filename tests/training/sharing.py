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

from grpocli.distributed.world import World
from grpocli.hardware.hardware import Single
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.packing import Packed
from grpocli.types import Row, Sampling

MIXTURE = "mixture of experts"


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


def main(folder: Path, parallel: str, names: list[str]) -> None:
    world = World(Single(device="cpu", parallel=parallel, context_parallel=2, timeout=120))
    assert world.context_parallel
    results: dict[str, Any] = {}
    for name in names:
        if name == MIXTURE:
            results[name] = updated(architecture("qwen3_moe").build(), world, *ALONE, packed=True, tokens=60)
        else:
            results[name] = updating.descended(world, folder, name)
    if parallel == "ddp":
        results["bytes"] = kept_bytes(world, folder)
    torch.save(results, folder / f"shared_{world.rank}_{parallel}.pt")
    if parallel == "fsdp2":
        world.close()


if __name__ == "__main__":
    for chosen in ("ddp", "fsdp2"):
        main(Path(sys.argv[1]), chosen, [name for name in sys.argv[2:] if name != MIXTURE or chosen == "ddp"])
