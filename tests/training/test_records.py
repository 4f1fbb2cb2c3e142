"""The records of a step: its metrics can be recomputed from them, and each completion has a status."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from composed import built
from training.recomputed import recomputed

from grpocli.progress import Watch
from grpocli.rewards.scorer import ScoreStats
from grpocli.runs.rollouts import read_rollouts, write_rollouts
from grpocli.training.collector import Collector, RolloutBatch, records_of, status_of
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Row, Sampling

WEIGHTS = {"accuracy": 1.0, "overlong": 0.5}
SCRIPT = [  # (accuracy, overlong) for each of a group's completions
    [(1.0, 0.0), (0.0, 0.0)],
    [(1.0, 0.0), (1.0, 0.0)],
    [(0.0, -1.0), (0.0, 0.0)],
    [(0.0, 0.0), (0.0, 0.0)],
    [(1.0, math.nan), (0.0, -0.25)],
]
IDS = [5, 6, 7, 8, 9, 10]


class Scripted:
    """A sampler that gives the n-th prompt the n-th group of rewards; lengths, finish reasons and versions vary."""

    def __init__(self) -> None:
        self.version = 1
        self.scorer: Any = SimpleNamespace(check_errors=lambda *_: None, warnings=lambda _: {})

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch
    ) -> tuple[list[Group], ScoreStats]:
        groups = []
        for prompt in prompts:
            number = int(prompt.uid)
            rollouts = []
            for k, scores in enumerate(SCRIPT[number % len(SCRIPT)]):
                ids = IDS[: 1 + (number + 2 * k) % len(IDS)]
                episode = Episode([{"role": "assistant", "content": "x"}], 1) if number % 2 else None
                mask = [int(i != 1) for i in range(len(ids))] if episode else None
                ended = "length" if len(ids) == len(IDS) else "stop"
                done = Completion(ids, [-1.0] * len(ids), ended, self.version, mask, episode=episode)
                rollouts.append(Rollout(prompt, done, "t", dict(zip(WEIGHTS, scores, strict=True))))
            groups.append(Group(prompt, rollouts))
        return groups, ScoreStats(Counter({"": len(prompts) * n}))


def collector(*overrides: str) -> Collector:
    return Collector(
        sampler=Scripted(),  # type: ignore[arg-type]
        algorithm=built(*overrides),
        draw=lambda number: Prompt(str(number), [1], "p", {"answer": number}),
        reward_weights=WEIGHTS,
        prompts_per_step=3,
        group_size=2,
        sampling=Sampling(len(IDS)),
        seed=0,
    )


def rows_of(collected: RolloutBatch, made: Collector, version: int) -> list[Row]:
    """The rows of a batch, as the trainer makes them."""
    mask_truncated = made.algorithm.keep.mask_truncated
    return [
        Row.of(rollout, advantage, number, mask_truncated)
        for number, (group, advantages) in enumerate(
            zip(collected.groups, made.advantages(collected.groups).tolist(), strict=True)
        )
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    ]


def steps(made: Collector, n: int, path: Path) -> list[tuple[list[dict[str, Any]], dict[str, float]]]:
    """The rows of each step's file, and the step's metrics."""
    found = []
    for step in range(1, n + 1):
        made.sampler.version = step  # type: ignore[attr-defined]
        collected = made.collect()
        rows = rows_of(collected, made, step)
        write_rollouts(path / "rollouts.parquet", records_of(collected, rows, made.algorithm, WEIGHTS, step), step)
        trained = {"tokens/trained": sum(sum(row.mask) for row in rows)}
        found.append((read_rollouts(path / "rollouts.parquet"), collected.metrics | trained))
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=grpo"],
        ["algorithm=grpo", "algorithm.keep.mask_truncated=true"],
        ["algorithm=dapo"],
        ["algorithm=dapo", "algorithm.keep.surplus=carry"],
        ["algorithm=dapo", "algorithm.keep.reward=accuracy", "algorithm.keep.surplus=carry"],
        ["algorithm=dapo", "algorithm.keep.max_rounds=1"],
    ],
)
def test_metrics_can_be_recomputed_from_the_file(overrides: list[str], tmp_path: Path) -> None:
    for rows, metrics in steps(collector(*overrides), 6, tmp_path):
        for name, value in recomputed(rows).items():
            assert metrics[name] == pytest.approx(value), name


def test_every_completion_has_a_status(tmp_path: Path) -> None:
    made = collector("algorithm=dapo", "algorithm.keep.reward=accuracy", "algorithm.keep.surplus=carry")
    seen: dict[str, list[tuple[int, str]]] = {}
    for rows, _ in steps(made, 4, tmp_path):
        for row in rows[::2]:
            seen.setdefault(row["uid"], []).append((row["step"], row["status"]))
    mixed = [uid for uid in seen if len({accuracy for accuracy, _ in SCRIPT[int(uid) % len(SCRIPT)]}) > 1]
    assert {status for uid in seen.keys() - set(mixed) for _, status in seen[uid]} == {"filtered"}
    kinds = {tuple(status for _, status in seen[uid]) for uid in mixed}
    assert ("carried", "trained") in kinds
    assert kinds <= {("trained",), ("carried", "trained"), ("carried",), ("surplus",)}
    assert sorted(map(int, seen)) == list(range(made.draws)), "every drawn group is in a file"
    for uid in mixed:
        (first, *later) = [step for step, _ in seen[uid]]
        assert later in ([], [first + 1])


def test_only_the_main_process_keeps_discarded_groups() -> None:
    made = collector("algorithm=dapo")
    assert made.collect().untrained
    made.keeps_untrained = False
    assert made.collect().untrained == []


def row(advantage: float, mask: list[int]) -> Row:
    return Row([1], [2, 3], mask, advantage, 0, [-1.0, -1.0])


@pytest.mark.parametrize(
    ("overrides", "given", "status"),
    [
        (["algorithm=dapo"], row(0.5, [1, 0]), "trained"),
        (["algorithm=dapo"], row(0.0, [1, 1]), "zero_advantage"),
        (["algorithm=dapo"], row(0.5, [0, 0]), "masked"),
        (["algorithm=grpo"], row(0.0, [1, 1]), "trained"),  # the KL to the reference has a gradient
        (["algorithm=grpo", "algorithm/kl=none"], row(0.0, [1, 1]), "zero_advantage"),
        (
            ["algorithm=dapo", "algorithm/entropy=bonus", "algorithm.entropy.coefficient=0.1"],
            row(0.0, [1, 1]),
            "trained",
        ),
        (["algorithm=dapo", "algorithm.aggregate.scope=micro_batch"], row(0.0, [1, 1]), "zero_advantage"),
        (["algorithm=dapo", "algorithm/tokens=top_entropy"], row(0.0, [1, 1]), "zero_advantage"),
    ],
)
def test_the_status_follows_from_advantage_mask_and_kl(overrides: list[str], given: Row, status: str) -> None:
    assert status_of(given, built(*overrides)) == status


def test_log_probs_and_entropies_of_the_update_are_in_the_file(tmp_path: Path) -> None:
    prompt = Prompt("0", [1], "p")
    rollouts = [Rollout(prompt, Completion([2, 3], [-1.0, -1.0], "stop", 1), "t", {"r": float(k)}) for k in range(2)]
    collected = RolloutBatch([Group(prompt, rollouts)], {})
    rows = [row(-1.0, [1, 1]), row(2.0, [1, 0])]  # scaled by a loss_multiplier
    rows[1].logp, rows[1].entropy = np.array([-0.5, -0.25], np.float32), np.array([1.0, 2.0], np.float32)
    rows[1].ratio, rows[1].clipped = np.array([1.5, 1.0], np.float32), np.array([1.0, 0.0], np.float32)
    records = records_of(collected, rows, built("algorithm=grpo"), {"r": 1.0}, step=1)
    write_rollouts(tmp_path / "rollouts.parquet", records, 1)
    first, second = read_rollouts(tmp_path / "rollouts.parquet")
    assert (first["trainer_logprobs"], first["entropies"]) == (None, None)
    assert (second["trainer_logprobs"], second["entropies"]) == ([-0.5, -0.25], [1.0, 2.0])
    assert (first["ratios"], first["clipped"]) == (None, None)
    assert (second["ratios"], second["clipped"]) == ([1.5, 1.0], [1, 0])
    assert (second["advantage"], second["loss_mask"], second["reward"]) == (2.0, [1, 0], 1.0)
