"""Dynamic sampling with scripted rewards, the metrics of a step, and its records, from which they follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import built
from training.scripted import FLAT, MIXED, Scripted, collector_of, prompt

from grpocli.errors import RewardError, RunError
from grpocli.progress import Watch
from grpocli.runs.rollouts import read_rollouts, write_rollouts
from grpocli.training.collector import Collector, records_of, status_of, tool_use
from grpocli.training.packing import rows_of
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Row

NAN = float("nan")


def collector(rewards: Sequence[Any], *overrides: str) -> tuple[Collector, Scripted]:
    sampler = Scripted(rewards)
    return collector_of(sampler, *overrides), sampler


def uids(groups: Sequence[Group]) -> list[str]:
    return [group.uid for group in groups]


def test_constant_groups_are_replaced_by_others() -> None:
    made, sampler = collector([MIXED, FLAT, FLAT, FLAT, MIXED, MIXED], "algorithm=dapo")
    reports: list[str] = []
    made.watch = Watch(lambda done, total, unit, detail="": reports.append(detail))
    got = made.collect(1)
    assert reports == ["token 3", "round 2, 1 of 3 groups kept, token 3"]
    assert uids(got.groups) == ["0", "4", "5"]
    assert sampler.asked == [3, 6]  # two groups are missing and one of three was kept, so six should give two
    assert made.schedule.draws == 9
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (2, 3)
    assert got.metrics["sampling/acceptance"] == pytest.approx(4 / 9)
    assert got.metrics["time/reward"] == 2
    assert made.advantages(got.groups).abs().min() > 0
    assert made.ended == {}


def test_the_size_of_a_refill_follows_the_kept_share_of_the_step() -> None:
    made, sampler = collector([FLAT, MIXED, MIXED, FLAT, FLAT, MIXED], "algorithm=dapo")
    made.collect(1)
    assert sampler.asked == [3, 2, 3]  # one is missing; two of three were kept, then two of five
    made, sampler = collector([*[FLAT] * 15, *[MIXED] * 9], "algorithm=dapo")
    made.collect(1)
    assert sampler.asked == [3, 9, 12]  # zero kept counts as one; at most four steps' prompts


def test_a_step_ends_when_its_rounds_are_used_up() -> None:
    made, sampler = collector([MIXED, *[FLAT] * 99], "algorithm=dapo", "algorithm.keep.max_rounds=4")
    got = made.collect(1)
    assert (uids(got.groups), sampler.asked) == (["0"], [3, 6, 12, 12])
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (4, 1)
    made, _ = collector([FLAT], "algorithm=dapo")
    assert tuple(made.advantages(made.collect(1).groups).shape) == (0, 2)


def test_a_step_without_enough_groups_may_be_an_error() -> None:
    made, _ = collector([FLAT], "algorithm=dapo", "algorithm.keep.on_exhausted=error")
    with pytest.raises(RunError, match=r"algorithm\.keep\.max_rounds=10: only 0 of 3 prompts"):
        made.collect(1)


def test_leftover_groups_are_trained_in_the_next_step() -> None:
    made, sampler = collector([FLAT, MIXED], "algorithm=dapo", "algorithm.keep.surplus=carry")
    sampler.version = 1
    first = made.collect(1)
    assert sampler.asked == [3, 6]
    assert (uids(first.groups), [*made.ended]) == (["1", "3", "5"], [7])
    sampler.version = 2
    second = made.collect(2)
    assert sampler.asked[2] == 2  # the leftover group is one of the three
    assert uids(second.groups)[:2] == ["7", "9"]
    assert second.metrics["sampling/carried"] == 1
    assert [group.rollouts[0].completion.version for group in second.groups] == [1, 2, 2]
    assert 7 not in made.ended


def test_leftover_groups_never_wait_for_more_than_one_step() -> None:
    sampler = Scripted([*[FLAT] * 6, *[MIXED] * 9])
    made = collector_of(sampler, "algorithm=dapo", "algorithm.keep.surplus=carry", prompts=2)
    sampler.version = 1
    made.collect(1)
    assert (sampler.asked, [*made.ended]) == ([2, 4, 8], [8, 9])  # 2 of 8 are trained on, 2 are leftover
    got = made.collect(2)
    assert sampler.asked == [2, 4, 8], "nothing is sampled if there are enough leftover groups"
    assert uids(got.groups) == ["8", "9"]
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (0, 2)
    assert got.metrics["reward"] == 0.5
    assert made.ended == {}


def test_groups_are_kept_by_the_accuracy_reward_of_their_task() -> None:
    mixture = {  # groups of the tasks: numbers, texts, texts, and one without any score
        "math": torch.tensor([[1.0, 0.0], [NAN, NAN], [NAN, NAN], [NAN, NAN]]),
        "style": torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [NAN, NAN]]),
        "judge": torch.tensor([[NAN, NAN], [1.0, 1.0], [0.0, 1.0], [NAN, NAN]]),
    }
    dapo = built("algorithm=dapo")
    assert dapo.kept(mixture, accuracy=["math", "judge", "judge", "judge"]).tolist() == [True, False, True, False]
    assert dapo.kept(mixture).tolist() == [True, True, False, False], "the first reward that applies to the group"
    rewards = {"accuracy": torch.tensor([[1.0, 1.0], [0.0, 1.0]]), "overlong": torch.tensor([[0.0, -0.5], [0.0, 0.0]])}
    for name, kept in {"accuracy": [False, True], "overlong": [True, False], "score": [True, True]}.items():
        assert built("algorithm=dapo", f"algorithm.keep.reward={name}").kept(rewards).tolist() == kept
    for wrong in (["jugde"] * 4, ["math"]):
        with pytest.raises((KeyError, ValueError)):
            dapo.kept(mixture, accuracy=wrong)


def test_difficulty_is_measured_by_the_accuracy_reward_of_the_task() -> None:
    """DGPO in a mixture measures the accuracy of a question by its own task, not by the first task."""
    dgpo = built("algorithm=dgpo", "algorithm/advantage=center")
    easy, hard = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    rewards = {"math": torch.tensor([hard, [NAN] * 4]), "judge": torch.tensor([[NAN] * 4, easy])}
    by_task = dgpo.advantages(rewards, accuracy=["math", "judge"])
    torch.testing.assert_close(by_task, dgpo.advantages({"one": torch.tensor([hard, easy])}))
    assert not torch.allclose(dgpo.advantages(rewards), by_task)


def test_a_collector_uses_the_accuracy_reward_of_each_groups_task() -> None:
    """Groups of the second task differ only in the reward of the first task."""
    for accuracy, kept in (("r", 3), ("judge", 0)):
        sampler = Scripted([[(0.0, 1.0), (1.0, 1.0)]])
        sampler.names = ("r", "judge")
        made = collector_of(sampler, "algorithm=dapo", "algorithm.keep.max_rounds=1")
        made.accuracy_rewards = {"": accuracy}
        assert len(made.collect(1).groups) == kept


def test_reward_errors_are_compared_with_a_whole_step() -> None:
    made, sampler = collector([FLAT, MIXED], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    made.group_size, sampler.errors = 4, 1
    made.collect(1)  # 1 of 12
    sampler.errors = 2
    with pytest.raises(RewardError, match=r"could not score 2 of 12 samples.*max_reward_errors=0\.1.*a reason"):
        made.collect(2)


def trls_metrics(lengths: list[int], cut: list[bool], rewards: list[float], prompts: list[int]) -> dict[str, float]:
    """The metrics of TRL's GRPO trainer, except that TRL logs lengths of 0 when no completion is terminated."""
    agg, truncated, values = torch.tensor(lengths), torch.tensor(cut), torch.tensor(rewards, dtype=torch.float64)
    term = agg[~truncated]
    variance = torch.nanmean((values - torch.nanmean(values)) ** 2)
    count = torch.sum(~torch.isnan(values))
    return {
        "num_tokens": sum(prompts) + sum(lengths),  # the attention mask of prompts and completions
        "completions/mean_length": agg.float().mean().item(),
        "completions/min_length": agg.float().min().item(),
        "completions/max_length": agg.float().max().item(),
        "completions/clipped_ratio": 1 - len(term) / len(agg),
        "completions/mean_terminated_length": term.float().mean().item(),
        "completions/min_terminated_length": term.float().min().item(),
        "completions/max_terminated_length": term.float().max().item(),
        "rewards/r/mean": torch.nanmean(values).item(),
        "rewards/r/std": torch.sqrt(variance * count / (count - 1)).item(),
    }


def test_metrics_of_completions_equal_those_of_trl() -> None:
    """They include completions that are not trained on, and exclude tokens of the environment."""
    lengths, cut, rewards = [3, 5, 2, 5, 1, 4], [False, True, False, True, False, False], [0.0, 1.0, NAN, 0.5, 1.0, 1.0]
    prompts = [Prompt(str(i), [1] * n, "p") for i, n in enumerate((2, 7, 4))]

    def completion(number: int, k: int) -> Completion:
        n, odd = lengths[2 * number + k], k == 1
        mask = None if odd else [1] * (n - 1) + [0]
        return Completion([1] * n, [-1.0] * n, "length" if cut[2 * number + k] else "stop", version=1, mask=mask)

    made = collector_of(Scripted([rewards[i : i + 2] for i in (0, 2, 4)], completion), "algorithm=grpo")
    made.draw = prompts.__getitem__
    written = [n - (k % 2 == 0) for k, n in enumerate(lengths)]
    expected = trls_metrics(written, cut, rewards, [2, 2, 7, 7, 4, 4])
    found = made.collect(1).metrics
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_tool_whose_calls_all_failed_is_named_with_its_first_error() -> None:
    def group(*calls: tuple[str, str]) -> Group:
        counts = dict(Counter(name for name, _ in calls))
        failed = dict(Counter(name for name, said in calls if said.startswith("error: ")))
        said = [
            {"role": "tool", "name": name, "content": text} | ({"is_error": True} if text[:5] == "error" else {})
            for name, text in calls
        ]
        done = Completion([1], [-1.0], "stop", version=1, episode=Episode(said, 2, {}, None, counts, failed))
        return Group(prompt(0), [Rollout(prompt(0), done, "t", {"r": 1.0})])

    broken, works, single = ("search", "error: KeyError: 'url'"), ("add", "3"), ("once", "error: x")
    unknown = ("unknown", "error: y")
    groups = [group(broken, ("add", "error: no"), single), group(("search", "error: other"), works, unknown)]
    metrics, warnings = tool_use([*groups, group(unknown)])
    assert list(warnings) == ["tool search"]
    assert "the first with KeyError: 'url'; " in warnings["tool search"]
    assert (metrics["tools/calls"], metrics["tools/add/failures"]) == (7 / 3, 1 / 3)


# Records

SCRIPT = [  # (accuracy, overlong) of each of a group's completions
    [(1.0, 0.0), (0.0, 0.0)],
    [(1.0, 0.0), (1.0, 0.0)],
    [(0.0, -1.0), (0.0, 0.0)],
    [(0.0, 0.0), (0.0, 0.0)],
    [(1.0, math.nan), (0.0, -0.25)],
]


def recorded(
    n: int, path: Path, *overrides: str
) -> tuple[Collector, list[tuple[list[dict[str, Any]], dict[str, Any]]]]:
    """The rows of each of n steps' files, and the step's metrics."""
    sampler = Scripted(SCRIPT)
    sampler.names = ("accuracy", "overlong")
    made, found = collector_of(sampler, *overrides), []
    for step in range(1, n + 1):
        sampler.version = step
        batch = made.collect(step)
        rows = rows_of(batch.groups, made.advantages(batch.groups), made.algorithm, step)
        records = records_of(batch, rows, made.algorithm, made.reward_weights, step)
        write_rollouts(path / "rollouts.parquet", records, step)
        trained = {"tokens/trained": sum(sum(row.mask) for row in rows)}
        found.append((read_rollouts(path / "rollouts.parquet"), batch.metrics | trained))
    return made, found


def test_every_completion_has_a_status(tmp_path: Path) -> None:
    carry = "algorithm.keep.reward=accuracy", "algorithm.keep.surplus=carry"
    made, found = recorded(4, tmp_path, "algorithm=dapo", *carry)
    seen: dict[str, list[tuple[int, str]]] = {}
    for row in (row for rows, _ in found for row in rows[::2]):
        seen.setdefault(row["uid"], []).append((row["step"], row["status"]))
    mixed = [uid for uid in seen if len({accuracy for accuracy, _ in SCRIPT[int(uid) % len(SCRIPT)]}) > 1]
    assert {status for uid in seen.keys() - set(mixed) for _, status in seen[uid]} == {"filtered"}
    kinds = {tuple(status for _, status in seen[uid]) for uid in mixed}
    assert ("carried", "trained") in kinds
    assert kinds <= {("trained",), ("carried", "trained"), ("carried",), ("surplus",)}
    assert sorted(map(int, seen)) == list(range(made.schedule.draws)), "every drawn group is in a file"
    for uid in mixed:
        (first, *later) = [step for step, _ in seen[uid]]
        assert later in ([], [first + 1])
    made.sampler.world.is_main = False  # type: ignore[misc]
    assert made.collect(1).untrained == [], "only the main process keeps discarded groups"


@pytest.mark.parametrize(
    ("overrides", "advantage", "mask", "status"),
    [
        (["algorithm=dapo"], 0.5, [1, 0], "trained"),
        (["algorithm=dapo"], 0.0, [1, 1], "zero_advantage"),
        (["algorithm=dapo"], 0.5, [0, 0], "masked"),
        (["algorithm=grpo"], 0.0, [1, 1], "trained"),  # the KL to the reference has a gradient
    ],
)
def test_the_status_follows_from_advantage_mask_and_kl(
    overrides: list[str], advantage: float, mask: list[int], status: str
) -> None:
    assert status_of(Row([1], [2, 3], mask, advantage, 0, [-1.0, -1.0]), built(*overrides)) == status
