"""The optimizer updates of one step in a process among several: what tests/training/test_processes.py starts."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from grpocli import build_algorithm
from grpocli.config.schema import Train
from grpocli.data import Sampling
from grpocli.launch.hardware import Single
from grpocli.models.lora import Lora, attach, is_adapted
from grpocli.training.batch import Row
from grpocli.training.optim import AdamW
from grpocli.training.policy import Policy
from grpocli.training.reference import BaseReference, Reference
from grpocli.training.update import Updater
from grpocli.training.world import World

TRAIN = Train(epochs=2, minibatches=2, micro_batch_tokens=40)
N_GROUPS = 5
ALGORITHMS = {
    "grpo": ("algorithm=grpo",),
    "dapo": ("algorithm=dapo",),
    "drgrpo": ("algorithm=drgrpo", "algorithm.aggregate.length=10"),
    "dgpo": ("algorithm=dgpo",),
    "cispo": ("algorithm=dapo", "algorithm/objective=cispo"),
    "gspo": ("algorithm=grpo", "algorithm/kl=none", "algorithm.objective.level=sequence"),
    "top_entropy and bonus": (
        "algorithm=grpo",
        "algorithm/tokens=top_entropy",
        "algorithm/entropy=bonus",
        "algorithm.entropy.coefficient=0.1",
        "algorithm/correction=token_mask",
    ),
    "lora": ("algorithm=grpo",),
}


def save_rows(rows: list[Row], path: Path) -> None:
    """Rows as JSON: of old_logp only whether there is one, the sampler's."""
    plain = [dataclasses.asdict(dataclasses.replace(row, old_logp=None)) for row in rows]
    stale = [row.old_logp is not None for row in rows]
    path.write_text(json.dumps([plain, stale]))


def load_rows(path: Path) -> list[Row]:
    plain, stale = json.loads(path.read_text())
    rows = [Row(**fields) for fields in plain]
    for row, is_stale in zip(rows, stale, strict=True):
        row.old_logp = torch.tensor(row.rollout_logp) if is_stale else None
    return rows


def updated(model: LlamaForCausalLM, world: World, overrides: tuple[str, ...], rows: list[Row]) -> dict[str, object]:
    """Weights and metrics after one step of four updates, by gradient descent: Adam would hide a gradient's size."""
    algorithm = build_algorithm(*overrides)
    policy = Policy(model, world.wrap(model), torch.float32)
    reference = BaseReference(policy) if is_adapted(model) else Reference(copy.deepcopy(model), policy)
    updater = Updater(
        world=world,
        policy=policy,
        reference=reference if algorithm.needs_reference else None,
        algorithm=algorithm,
        optim=AdamW(lr=0.1, max_grad_norm=0.0),
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        train=TRAIN,
        sampling=Sampling(10, temperature=0.9),
        total_updates=10,
    )
    metrics = updater.step(rows, N_GROUPS)
    assert updater.updates == TRAIN.updates_per_step
    return {"metrics": metrics, "weights": torch.cat([w.flatten() for _, w in policy.weights()])}


def main(folder: Path) -> None:
    """Every algorithm, from the model and rows in the folder; a file of results a process."""
    world = World(Single(device="cpu", timeout=120))
    results = {}
    for name, overrides in ALGORITHMS.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        if name == "lora":
            model = attach(model, Lora(rank=4), seed=0)
        results[name] = updated(model, world, overrides, load_rows(folder / "rows.json"))
    torch.save(results, folder / f"{world.size}_{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
