"""Dynamic sampling with scripted rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from grpocli import build_algorithm
from grpocli.data import Completion, Group, Prompt, Rollout, Sampling
from grpocli.errors import ConfigError, RewardError, RunError
from grpocli.rewards.scoring import Scorer
from grpocli.rewards.tally import Tally
from grpocli.rewards.text import ExactMatch
from grpocli.rollout.seeds import seed_of
from grpocli.training import carry
from grpocli.training.collect import Collector


class Scripted:
    """A sampler whose n-th prompt gets the n-th pair of rewards."""

    def __init__(self, rewards: Sequence[tuple[float, ...]], errors: int = 0) -> None:
        self.rewards = rewards
        self.errors = errors
        self.asked: list[int] = []
        self.scorer = Scorer({"r": ExactMatch()}, max_errors=0.1)

    def groups(self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling):
        self.asked.append(len(prompts))
        done = Completion([1, 2], [-1.0, -1.5], "stop", version=len(self.asked))
        groups = [
            Group(p, [Rollout(p, done, "t", {"r": value}) for value in self.rewards[int(p.uid) % len(self.rewards)]])
            for p in prompts
        ]
        return groups, Tally(
            Counter({"": len(prompts) * n}), 1.0, Counter({("r", ""): self.errors}), {("r", ""): "a reason"}
        )


def prompt(number: int) -> Prompt:
    return Prompt(str(number), [1], "p")


def collector(rewards: Sequence[tuple[float, ...]], *overrides: str) -> tuple[Collector, Scripted]:
    sampler = Scripted(rewards)
    made = Collector(
        sampler=sampler,  # type: ignore[arg-type]
        algorithm=build_algorithm(*overrides),
        draw=prompt,
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
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (1, 3)
    assert got.metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)


def test_constant_groups_are_replaced_by_others() -> None:
    made, sampler = collector([MIXED, FLAT, FLAT, FLAT, MIXED, MIXED], "algorithm=dapo")
    got = made.collect()
    assert [g.uid for g in got.groups] == ["0", "4", "5"]
    assert sampler.asked == [3, 6]  # two are missing, and one of three was kept: six should give two
    assert made.draws == 9
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (2, 3)
    assert got.metrics["sampling/acceptance"] == pytest.approx(4 / 9)
    assert got.metrics["time/reward"] == 2
    assert got.advantages.abs().min() > 0
    assert made.carried == []


def test_a_refill_is_sized_by_what_was_kept_in_the_step() -> None:
    made, sampler = collector([FLAT, MIXED, MIXED, FLAT, FLAT, MIXED], "algorithm=dapo")
    made.collect()
    assert sampler.asked == [3, 2, 3]  # one is missing, at two of three, then at two of five
    made, sampler = collector([*[FLAT] * 15, *[MIXED] * 9], "algorithm=dapo")
    made.collect()
    assert sampler.asked == [3, 9, 12]  # none kept counts as one; never more than four steps' worth


def test_when_the_rounds_are_used_up() -> None:
    made, sampler = collector([MIXED, *[FLAT] * 99], "algorithm=dapo", "algorithm.keep.max_rounds=4")
    got = made.collect()
    assert [g.uid for g in got.groups] == ["0"]
    assert sampler.asked == [3, 6, 12, 12]
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (4, 1)
    made, _ = collector([FLAT], "algorithm=dapo", "algorithm.keep.on_exhausted=error")
    with pytest.raises(RunError, match=r"algorithm\.keep\.max_rounds=10: only 0 of 3 prompts"):
        made.collect()


def test_surplus_is_carried_into_the_next_step() -> None:
    made, sampler = collector([FLAT, MIXED], "algorithm=dapo", "algorithm.keep.surplus=carry")
    first = made.collect()
    assert sampler.asked == [3, 6]
    assert [g.uid for g in first.groups] == ["1", "3", "5"]
    assert [g.uid for g in made.carried] == ["7"]
    second = made.collect()
    assert sampler.asked[2] == 2  # the carried group is one of the three
    assert [g.uid for g in second.groups][:2] == ["7", "9"]
    assert second.metrics["sampling/carried"] == 1
    assert second.groups[0].rollouts[0].completion.version == 2  # of the second call; the others are later
    assert "7" not in {g.uid for g in made.carried}


def test_carried_groups_never_wait_for_more_than_one_step() -> None:
    made, sampler = collector([*[FLAT] * 6, *[MIXED] * 9], "algorithm=dapo", "algorithm.keep.surplus=carry")
    made.prompts_per_step = 2
    made.collect()
    assert sampler.asked == [2, 4, 8]
    assert [g.uid for g in made.carried] == ["8", "9"]  # of 8 kept 2 are trained on; carried is one step's worth
    got = made.collect()
    assert sampler.asked == [2, 4, 8], "nothing is sampled where enough was carried"
    assert [g.uid for g in got.groups] == ["8", "9"]
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (0, 2)
    assert got.metrics["reward"] == 0.5
    assert made.carried == []


def test_carried_groups_survive_a_checkpoint(tmp_path: Path) -> None:
    made, _ = collector([(1.0, 1.0, 1.0), (0.0, 1.0, float("nan"))], "algorithm=dapo", "algorithm.keep.surplus=carry")
    made.collect()
    assert made.carried
    carry.save(made.carried, tmp_path)
    assert repr(carry.load(tmp_path, prompt, 3, ["r"], most=9)) == repr(made.carried)
    assert carry.load(tmp_path / "elsewhere", prompt, 3, ["r"], most=9) == []


def test_carried_groups_that_do_not_fit_a_changed_config_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = collector([*[FLAT] * 3, *[MIXED] * 9], "algorithm=dapo", "algorithm.keep.surplus=carry")
    made.collect()
    assert len(made.carried) == 3
    carry.save(made.carried, tmp_path)

    def other_prompt(number: int) -> Prompt:
        return Prompt(str(number), [2], "another seed")

    assert carry.load(tmp_path, prompt, 2, ["r"], most=3) == made.carried
    assert caplog.text == ""
    assert carry.load(tmp_path, prompt, 2, ["r"], most=1) == made.carried[:1]
    assert "2 of 3 carried groups do not fit" in caplog.text
    assert carry.load(tmp_path, prompt, 4, ["r"], most=3) == []
    assert carry.load(tmp_path, prompt, 2, ["r", "format"], most=3) == []
    assert carry.load(tmp_path, other_prompt, 2, ["r"], most=3) == []


@pytest.mark.parametrize(
    "damage", [{"logprobs": torch.tensor([-1.0])}, {"logprobs": torch.tensor([-1.0, float("nan")])}]
)
def test_a_damaged_carried_completion_is_refused(damage: dict[str, torch.Tensor], tmp_path: Path) -> None:
    made, _ = collector([*[FLAT] * 3, *[MIXED] * 9], "algorithm=dapo", "algorithm.keep.surplus=carry")
    made.collect()
    carry.save(made.carried, tmp_path)
    saved = torch.load(tmp_path / carry.CARRIED, weights_only=True)
    saved[0]["rollouts"][0] |= damage
    torch.save(saved, tmp_path / carry.CARRIED)
    with pytest.raises(ValueError, match="finite log-prob"):
        carry.load(tmp_path, prompt, 2, ["r"], most=3)


def test_a_group_can_be_kept_by_one_reward_alone() -> None:
    """DAPO's accuracy: groups that differ in length alone teach nothing about the answer."""
    rewards = {"accuracy": torch.tensor([[1.0, 1.0], [0.0, 1.0]]), "overlong": torch.tensor([[0.0, -0.5], [0.0, 0.0]])}
    assert build_algorithm("algorithm=dapo").kept(rewards).tolist() == [True, True]
    by_accuracy = build_algorithm("algorithm=dapo", "algorithm.keep.reward=accuracy")
    assert by_accuracy.kept(rewards).tolist() == [False, True]
    with pytest.raises(ConfigError, match=r"algorithm\.keep\.reward=style: choose one of .*accuracy, overlong"):
        build_algorithm("algorithm=dapo", "algorithm.keep.reward=style").kept(rewards)


def test_reward_errors_are_judged_against_a_whole_step() -> None:
    made, _ = collector([FLAT, MIXED], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    made.group_size, made.sampler.errors = 4, 1  # type: ignore[attr-defined]
    made.collect()  # 1 of 12
    made.sampler.errors = 2  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match=r"could not score 2 of 12 samples.*max_reward_errors=0\.1.*a reason"):
        made.collect()


def test_nothing_kept_is_an_empty_step() -> None:
    made, _ = collector([FLAT], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    got = made.collect()
    assert (got.groups, tuple(got.advantages.shape)) == ([], (0, 2))


def test_seeds_differ_by_run_and_draw() -> None:
    seeds = {seed_of(run, draw) for run in range(3) for draw in range(100)}
    assert len(seeds) == 300
    assert seed_of(1, 2) == seed_of(1, 2)
