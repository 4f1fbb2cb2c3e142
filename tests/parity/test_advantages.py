"""Advantages of several weighted rewards, some of which do not apply, in TRL and grpocli."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from parity.table import Table
from parity.trl_side import Peer, random_batch
from torch import Tensor

from grpocli import build_algorithm

GROUPS, GROUP = 6, 4
WEIGHTS = {"correct": 1.0, "format": 0.3, "style": -0.7}
CASES = {  # TRL's settings, grpocli's overrides
    "std": ({"scale_rewards": "group"}, ["algorithm/advantage=std"]),
    "batch std": ({"scale_rewards": "batch"}, ["algorithm/advantage=batch_std"]),
    "none": ({"scale_rewards": "none"}, ["algorithm/advantage=center"]),
    "normalised, then summed": (
        {"multi_objective_aggregation": "normalize_then_sum"},
        ["algorithm/advantage=std", "algorithm.combine=normalize_then_sum"],
    ),
}


def some_rewards(seed: int) -> dict[str, list[float | None]]:
    """Ragged: a constant group, one with a single score, one with none, and rewards that apply here and there.

    The constant group's rewards are powers of two: their mean is exact, which test_differences.py says more about.
    """
    random = Random(seed)
    rewards: dict[str, list[float | None]] = {}
    for name in WEIGHTS:
        values = [random.choice([None, 0.0, 0.25, 1.0, random.random()]) for _ in range(GROUPS * GROUP)]
        values[0:4] = [0.5 if name == "correct" else None] * 4
        values[4:8] = [None, 1.0, None, None]
        values[8:12] = [None] * 4
        rewards[name] = values
    return rewards


def as_tensors(rewards: dict[str, list[float | None]]) -> dict[str, Tensor]:
    return {
        name: torch.tensor([float("nan") if value is None else value for value in values]).reshape(-1, GROUP)
        for name, values in rewards.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_trls(case: str, table: Table, folder: Path) -> None:
    settings, overrides = CASES[case]
    scripted = some_rewards(0)
    peer = Peer(folder, GROUPS * GROUP, 2, scripted, reward_weights=list(WEIGHTS.values()), **settings)
    algorithm = build_algorithm("algorithm=grpo", *overrides)
    for seed in range(20):
        for name, values in some_rewards(seed).items():
            scripted[name][:] = values  # the reward functions return these lists
        peer.sample(random_batch(torch.float32, seed, (2,) * GROUPS * GROUP))
        ours = algorithm.advantages(as_tensors(scripted), WEIGHTS).flatten()
        assert ours.count_nonzero() > GROUP
        table.compare(f"advantages, {case}", "value", ours, peer.advantages, torch.float32)
