"""The optimizer updates of one step in one of several processes, started by tests/training/test_processes.py."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composed import built
from transformers import AutoModelForCausalLM

from grpocli.config.schema import Train
from grpocli.distributed import sharded_safetensors as shards
from grpocli.distributed.parallel import Make
from grpocli.distributed.world import World
from grpocli.distributed.zero import Zero3
from grpocli.hardware import Single
from grpocli.models.head import widen_head
from grpocli.models.loading import checkpoint_activations
from grpocli.models.lora import Lora, attach, is_adapted
from grpocli.models.tiny import make_tokenizer
from grpocli.processes.threads import end_process
from grpocli.rollout.sampler import sample
from grpocli.training import checkpoint
from grpocli.training.checkpoint import State
from grpocli.training.optim import AdamW, Muon, Optimizer, Sgd
from grpocli.training.packing import FlexPacked, Packed
from grpocli.training.policy import BaseReference, Policy, Reference
from grpocli.training.trials import compile_layers, pack
from grpocli.training.update import SKIPPED, Updater
from grpocli.types import Request, Row, Sampling

TRAIN = Train(epochs=2, minibatches=2, micro_batch_tokens=28)
N_GROUPS = 5
BONUS = "algorithm/tokens=top_entropy algorithm/entropy=bonus algorithm.entropy.coefficient=0.1"
ALGORITHMS = {name: f"algorithm={name}" for name in ("grpo", "dapo", "dgpo", "sft")} | {
    "drgrpo": "algorithm=drgrpo algorithm.aggregate.length=10",
    "gspo": "algorithm=grpo algorithm/kl=none algorithm.objective.level=sequence",
    "top_entropy and bonus": f"algorithm=grpo {BONUS} algorithm/correction=token_mask",
    **dict.fromkeys(("lora", "checkpointing", "padded"), "algorithm=grpo"),
    **dict.fromkeys(("clipped", "bfloat16", "float32 head", "float16"), "algorithm=dapo"),
}
IN_16_BITS = {"bfloat16": torch.bfloat16, "float32 head": torch.bfloat16, "float16": torch.float16}
OF_SHARDS = ("grpo", "clipped", "lora", "checkpointing", *IN_16_BITS)
"""Those whose computation depends on how weights are sharded. Three processes with fsdp2 test the others, too."""


def save_rows(rows: list[Row], path: Path) -> None:
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


def load_rows(path: Path) -> list[Row]:
    return [Row(**fields) for fields in json.loads(path.read_text())]


def loaded(
    world: World, path: Path, make: Make, lora: bool = False, dtype: torch.dtype = torch.float32, wide: bool = False
):
    """A policy and its optimizer, as `grpocli.training.build_trainer` makes them."""
    with world.parallel.loading():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if lora:
            model = attach(model, Lora(rank=4), seed=0)
        if wide:
            widen_head(model)
    wrapped, optimizer = world.parallel.prepare(model, dtype, make)
    policy = Policy(model, wrapped, dtype, world.parallel)
    policy.shared_with = world.context_parallel
    return policy, optimizer


def updater_of(
    world: World, folder: Path, policy: Policy, optimizer: Any, optim: Optimizer, overrides: str, packed: bool = True
) -> Updater:
    needs_reference, reference = built(*overrides.split()).needs_reference, None
    if needs_reference and is_adapted(policy.model):
        reference = BaseReference(policy)
    elif needs_reference:
        with world.parallel.loading():
            model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        reference = Reference(model, policy)
    assert not packed or pack(policy, reference)
    updater = updater_for(None, world, *overrides.split(), policy=policy, reference=reference, optim=optim)
    updater.optimizer, updater.train = optimizer, TRAIN
    return updater


SAMPLING = Sampling(10, temperature=0.9)


def updater_for(
    model: Any,
    world: World,
    *overrides: str,
    policy: Policy | None = None,
    reference: Any = None,
    optim: Optimizer | None = None,
    sampling: Sampling = SAMPLING,
    **train: int,
) -> Updater:
    """An updater of a copy of the model, or of a policy; the reference is the model, if the algorithm needs one."""
    algorithm, optim = built(*overrides), optim or AdamW(lr=1e-3, max_grad_norm=0.0)
    if policy is None:
        copied = copy.deepcopy(model)
        wrapped, optimizer = world.parallel.prepare(copied, torch.float32, optim.make_for)
        policy = Policy(copied, wrapped, torch.float32, world.parallel)
    else:
        optimizer = optim.make_for(policy.model)
    if reference is None and algorithm.needs_reference:
        reference = Reference(copy.deepcopy(model), policy)
    return Updater(world, policy, reference, algorithm, optim, optimizer, Train(**train), sampling, 10)


def copies(rows: Sequence[Row]) -> list[Row]:
    """The rows, which updates change, for another update."""
    return [copy.copy(row) for row in rows]


def train_step(updater: Updater, rows: Sequence[Row], n_groups: int, step: int = 1) -> dict[str, float]:
    """The updates of a step, as `Trainer.update` makes them. Returns the metrics."""
    windows = updater.begin_step(rows, n_groups, step)
    for epoch in range(updater.train.epochs):
        for window in windows:
            updater.update(window, epoch)
    return updater.metrics(rows)


def known(updater: Updater, row: Row, name: str) -> torch.Tensor:
    """What the last step knew of a row's tokens."""
    for window in updater.windows:
        for micro_batch in window.micro_batches:
            for one, values_T in zip(micro_batch.rows, micro_batch.known[name], strict=True):
                if one is row:
                    return values_T[: len(row.completion_ids)]
    raise KeyError(name)


def whole(policy: Policy) -> torch.Tensor:
    """All weights as one tensor. Collective."""
    return torch.cat([policy.parallel.gather(w.detach()).float().flatten() for _, w in policy.weights()])


def descended(world: World, folder: Path, name: str, kind: str = "") -> dict[str, object]:
    """Weights and metrics after a step of four updates (one in 16 bits). kind: "flex" for `flex_attention`, "compiled".

    Plain gradient descent, because Adam would hide a gradient's size.
    """
    dtype = IN_16_BITS.get(name, torch.float32)
    policy, optimizer = loaded(world, folder / "model", descent, name == "lora", dtype, name == "float32 head")
    if name == "checkpointing":
        checkpoint_activations(policy.model)
    policy.packed = FlexPacked if kind == "flex" else Packed
    optim = AdamW(lr=0.1, max_grad_norm=0.3 if name == "clipped" else 0.0)
    updater = updater_of(world, folder, policy, optimizer, optim, ALGORITHMS[name], name != "padded")
    if kind == "compiled":
        compile_layers(policy, updater.reference, world)
    if name in IN_16_BITS:  # rounding in earlier updates changes later ones by several per cent
        updater.train = dataclasses.replace(TRAIN, epochs=1, minibatches=1)
    rows = load_rows(folder / "rows.json")
    metrics = train_step(updater, rows, N_GROUPS)
    assert updater.updates == updater.train.updates_per_step
    if updater.algorithm.supervised:
        metrics |= {f"eval/{metric}": value for metric, value in updater.target_loss(rows).items()}
    result = {"metrics": metrics, "weights": whole(policy)}
    updater.gather(rows)
    if world.is_main:
        result["scored"] = [
            None
            if row.logp is None
            else torch.from_numpy(np.stack([row.logp, row.entropy, np.log(row.ratio), row.clipped]))
            for row in rows  # some are of older weights, so that each has a ratio
        ]
    if type(updater.reference) is Reference and not isinstance(world.parallel, Zero3):
        updater.reference.mix(0.5)
        mixed = policy.parallel.parameters(updater.reference.model)
        result["mixed"] = torch.cat([policy.parallel.gather(w).flatten() for _, w in mixed])
    return result


def descent(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


OPTIMIZERS = {
    "saved": AdamW(lr=1e-3, weight_decay=0.1),
    "muon": Muon(lr=1e-3, weight_decay=0.1),
    "momentum": Sgd(lr=0.1, momentum=0.9),
}
"""Optimizers that work with fsdp2, by the first word of their folders."""


def went_on(world: World, folder: Path, start: Path, end: Path) -> dict[str, object]:
    """One step of `end`'s optimizer from `start`, saved as `end`; the state that was loaded is saved beside it."""
    optim = OPTIMIZERS[end.name.partition("_")[0]]
    policy, optimizer = loaded(world, start, optim.make_for)
    tokenizer = make_tokenizer()
    resumed = (start / checkpoint.STATE).is_file()
    contents = checkpoint.Contents(policy, optimizer, tokenizer)
    if resumed:
        checkpoint.load_optimizer(start, policy, optimizer, optim)
        checkpoint.save(end.with_suffix(".again"), State(), contents, world)
    updater = updater_of(world, folder, policy, optimizer, optim, "algorithm=dapo")
    metrics = train_step(updater, load_rows(folder / "rows.json"), N_GROUPS)
    checkpoint.save(end, State(), contents, world)
    checkpoint.save_model(end / "final", policy, tokenizer, torch.bfloat16, "card", world)
    return {"metrics": metrics, "weights": whole(policy)}


def sampled(world: World, folder: Path) -> list[list[int]]:
    """Each process samples a different number of tokens, more than once."""
    policy, _ = loaded(world, folder / "model", descent)
    completions = []
    for turn in (0, 1):
        with policy.sampling_mode():
            completions += sampled_by(policy.model, world.rank, turn)
        policy.score([2, 5, 6, 7])
    return completions


def sampled_by(model: Any, rank: int, turn: int) -> list[list[int]]:
    """What a process samples in a turn."""
    requests = [Request([2, 5, 6 + rank], 2, 10 * turn + k) for k in range(rank + 1)]
    groups = [sample(model, [request], Sampling(4 + 3 * rank), [1], 1)[0] for request in requests]
    return [completion.token_ids for group in groups for completion in group]


SHARED = ("ddp", "fsdp2")


def overflowed(world: World, folder: Path) -> dict[str, Any]:
    """Updates in float16: until the first one that the scale is not too large for, and one with an infinite gradient.

    The gradient is that of the last micro-batch in the main process. `kept` says what no skipped update has changed.
    """
    optim = AdamW(lr=1e-3, eps=0.1)
    policy, optimizer = loaded(world, folder / "model", optim.make_for, dtype=torch.float16)
    updater = updater_of(world, folder, policy, optimizer, optim, "algorithm=dapo")
    updater.train = dataclasses.replace(TRAIN, epochs=1, minibatches=1)
    rows, parallel = load_rows(folder / "rows.json"), policy.parallel
    parallel.scaler.load_state_dict(parallel.scaler.state_dict() | {"scale": 2.0**30})
    plain = parallel.backward

    def backward(wrapped: Any, loss: torch.Tensor) -> None:
        last = updater.micro_batches_done + 1 == len(updater.windows[0].micro_batches)
        plain(wrapped, loss * (math.inf if broken and last and world.is_main else 1.0))

    def state() -> list[torch.Tensor]:
        moments = [parallel.moments(optimizer, p) for _, p in policy.model.named_parameters()]
        return [whole(policy), *(value.clone() for each in moments for _, value in each)]

    parallel.backward = backward  # type: ignore[method-assign]
    seen, kept = [], []
    for step in range(1, 30):
        before, broken = state() if step > 1 else [whole(policy)], bool(seen) and not seen[-1][SKIPPED]
        seen.append(train_step(updater, [dataclasses.replace(row) for row in rows], N_GROUPS, step))
        if seen[-1][SKIPPED]:
            kept.append(all(map(torch.equal, before, state())))
        if broken:
            break
    return {"metrics": seen, "kept": kept, "weights": whole(policy)}


def everything(world: World, folder: Path, parallel: str) -> dict[str, Any]:
    """What every algorithm computes, and what else all processes do together."""
    tried = OF_SHARDS if parallel == "zero3" or (world.size, parallel) == (2, "fsdp2") else ALGORITHMS
    names = [name for name in tried if name != "lora" or parallel != "zero3"]
    results: dict[str, Any] = {name: descended(world, folder, name) for name in names}
    results["overflowed"] = overflowed(world, folder)
    if parallel != "zero3":
        results["sampled"] = sampled(world, folder)
    return results


def main(folder: Path, parallel: str, checkpoints_only: bool) -> None:
    """Train every algorithm on the model and rows in the folder; write one file of results per process."""
    world = World(Single(device="cpu", parallel=parallel, timeout=120))
    shards.FILE_BYTES = 8192  # so that every process writes several
    results: dict[str, Any] = {} if checkpoints_only else everything(world, folder, parallel)
    ran = f"{world.size}_{parallel}"
    results["model"] = went_on(world, folder, folder / "model", folder / f"saved_{ran}")
    others = ["muon", "momentum"] if parallel in ("ddp", "fsdp2") else []
    results |= {name: went_on(world, folder, folder / "model", folder / f"{name}_{ran}") for name in others}
    for saved in [] if world.size == 2 else [f"{name}_2_{kind}" for name in ("saved", *others) for kind in SHARED]:
        results[saved] = went_on(world, folder, folder / saved, folder / f"{saved}_to_{ran}")
    torch.save(results, folder / f"{world.size}_{world.rank}_{parallel}.pt")
    if parallel == sys.argv[-1]:
        world.close()


if __name__ == "__main__":
    place, what, *kinds = sys.argv[1:]
    for chosen in kinds:
        main(Path(place), chosen, what == "checkpoints")
    end_process(0)  # as a trainer does; Python's finalization may abort while a thread runs C++ code
