"""Dynamic sampling with scripted rewards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grpocli import build_algorithm
from grpocli.data import Completion, Group, Prompt, Rollout, Sampling
from grpocli.errors import RunError
from grpocli.training.collect import Collector, merged, seed_of


class Scripted:
    """A sampler whose n-th prompt gets the n-th pair of rewards."""

    def __init__(self, rewards: Sequence[tuple[float, float]]) -> None:
        self.rewards = rewards
        self.asked: list[int] = []

    def groups(self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling):
        self.asked.append(len(prompts))
        done = Completion([1, 2], [-1.0, -1.0], "stop", version=1)
        groups = [
            Group(p, [Rollout(p, done, "", {"r": value}) for value in self.rewards[int(p.uid) % len(self.rewards)]])
            for p in prompts
        ]
        return groups, {"time/reward": 1.0, "rewards/r/errors": 1.0}


def collector(rewards: Sequence[tuple[float, float]], *overrides: str) -> tuple[Collector, Scripted]:
    sampler = Scripted(rewards)
    made = Collector(
        sampler=sampler,  # type: ignore[arg-type]
        algorithm=build_algorithm(*overrides),
        draw=lambda number: Prompt(str(number), [1], "p"),
        weights={"r": 1.0},
        prompts_per_step=3,
        group_size=2,
        sampling=Sampling(4),
        seed=0,
    )
    return made, sampler


MIXED, FLAT = (0.0, 1.0), (1.0, 1.0)


def test_all_groups_are_kept_in_one_round() -> None:
    made, sampler = collector([MIXED, FLAT, FLAT], "algorithm=grpo")
    got = made.collect()
    assert [g.uid for g in got.groups] == ["0", "1", "2"]
    assert got.advantages[1:].eq(0).all()
    assert (sampler.asked, made.draws) == ([3], 3)
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (1, 1.0)
    assert got.metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)


def test_constant_groups_are_replaced_by_others() -> None:
    made, sampler = collector([MIXED, FLAT, FLAT, FLAT, MIXED, MIXED], "algorithm=dapo")
    got = made.collect()
    assert [g.uid for g in got.groups] == ["0", "4", "5"]
    assert sampler.asked == [3, 2, 1]
    assert made.draws == 6
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (3, 0.5)
    assert got.metrics["rewards/r/errors"] == 3
    assert got.advantages.abs().min() > 0


def test_when_the_rounds_are_used_up() -> None:
    made, sampler = collector([MIXED, *[FLAT] * 99], "algorithm=dapo", "algorithm.keep.max_rounds=4")
    got = made.collect()
    assert [g.uid for g in got.groups] == ["0"]
    assert sampler.asked == [3, 2, 2, 2]
    made, _ = collector([FLAT], "algorithm=dapo", "algorithm.keep.on_exhausted=error")
    with pytest.raises(RunError, match=r"algorithm\.keep\.max_rounds=10: only 0 of 3 prompts"):
        made.collect()


def test_nothing_kept_is_an_empty_step() -> None:
    made, _ = collector([FLAT], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    got = made.collect()
    assert (got.groups, tuple(got.advantages.shape)) == ([], (0, 2))


def test_what_processes_counted_is_put_together() -> None:
    counts = [{"time/reward": 1.0, "rewards/r/errors": 2.0}, {"time/reward": 3.0, "rewards/r/errors": 1.0}]
    assert merged(counts) == {"time/reward": 3.0, "rewards/r/errors": 3.0}


def test_seeds_differ_by_run_and_draw() -> None:
    seeds = {seed_of(run, draw) for run in range(3) for draw in range(100)}
    assert len(seeds) == 300
    assert seed_of(1, 2) == seed_of(1, 2)
