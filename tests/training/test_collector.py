"""Dynamic sampling with scripted rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from composed import built

from grpocli.errors import ConfigError, RewardError, RunError
from grpocli.progress import Watch
from grpocli.rewards.scorer import RewardStats, Scorer, ScoreStats
from grpocli.rewards.text_match import ExactMatch
from grpocli.rollout.sampling import derive_seed
from grpocli.training import saved_rollouts
from grpocli.training.collector import Collector, ToolUse, rewards_of, rollout_metrics
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Sampling


class Scripted:
    """A sampler that gives the n-th prompt the n-th pair of rewards."""

    def __init__(self, rewards: Sequence[tuple[float, ...]], errors: int = 0) -> None:
        self.rewards = rewards
        self.errors = errors
        self.asked: list[int] = []
        self.scorer = Scorer({"r": ExactMatch()}, max_errors=0.1)

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch
    ):
        self.asked.append(len(prompts))
        watch.progress(1, 2, "completions", "token 3")
        done = Completion([1, 2], [-1.0, -1.5], "stop", version=len(self.asked))
        groups = [
            Group(p, [Rollout(p, done, "t", {"r": value}) for value in self.rewards[int(p.uid) % len(self.rewards)]])
            for p in prompts
        ]
        found = RewardStats(errors=self.errors, first_error="a reason")
        return groups, ScoreStats(Counter({"": len(prompts) * n}), 1.0, {("r", ""): found})


def prompt(number: int) -> Prompt:
    return Prompt(str(number), [1], "p")


def redraw(number: int, row: int | None) -> Prompt:
    return prompt(number)


def collector(rewards: Sequence[tuple[float, ...]], *overrides: str) -> tuple[Collector, Scripted]:
    sampler = Scripted(rewards)
    made = Collector(
        sampler=sampler,  # type: ignore[arg-type]
        algorithm=built(*overrides),
        draw=prompt,
        reward_weights={"r": 1.0},
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
    assert made.advantages(got.groups)[1:].eq(0).all()
    assert (sampler.asked, made.draws) == ([3], 3)
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (1, 3)
    assert got.metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)


def test_constant_groups_are_replaced_by_others() -> None:
    made, sampler = collector([MIXED, FLAT, FLAT, FLAT, MIXED, MIXED], "algorithm=dapo")
    got = made.collect()
    assert [g.uid for g in got.groups] == ["0", "4", "5"]
    assert sampler.asked == [3, 6]  # two groups are missing and one of three was kept, so six should give two
    assert made.draws == 9
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (2, 3)
    assert got.metrics["sampling/acceptance"] == pytest.approx(4 / 9)
    assert got.metrics["time/reward"] == 2
    assert made.advantages(got.groups).abs().min() > 0
    assert made.leftover == []


def test_the_progress_of_a_refill_names_its_round_and_the_groups_kept() -> None:
    made, _ = collector([MIXED, FLAT, FLAT, FLAT, MIXED, FLAT, FLAT, FLAT, FLAT, MIXED], "algorithm=dapo")
    reports: list[str] = []
    made.watch = Watch(lambda done, total, unit, detail="": reports.append(detail))
    made.collect()
    assert reports == [
        "token 3",
        "round 2, 1 of 3 groups kept, token 3",
        "round 3, 2 of 3 groups kept, token 3",
    ]


def test_the_size_of_a_refill_follows_the_kept_share_of_the_step() -> None:
    made, sampler = collector([FLAT, MIXED, MIXED, FLAT, FLAT, MIXED], "algorithm=dapo")
    made.collect()
    assert sampler.asked == [3, 2, 3]  # one is missing; two of three were kept, then two of five
    made, sampler = collector([*[FLAT] * 15, *[MIXED] * 9], "algorithm=dapo")
    made.collect()
    assert sampler.asked == [3, 9, 12]  # zero kept counts as one; at most four steps' prompts


def test_a_step_ends_when_its_rounds_are_used_up() -> None:
    made, sampler = collector([MIXED, *[FLAT] * 99], "algorithm=dapo", "algorithm.keep.max_rounds=4")
    got = made.collect()
    assert [g.uid for g in got.groups] == ["0"]
    assert sampler.asked == [3, 6, 12, 12]
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (4, 1)
    made, _ = collector([FLAT], "algorithm=dapo", "algorithm.keep.on_exhausted=error")
    with pytest.raises(RunError, match=r"algorithm\.keep\.max_rounds=10: only 0 of 3 prompts"):
        made.collect()


def test_leftover_groups_are_trained_in_the_next_step() -> None:
    made, sampler = collector([FLAT, MIXED], "algorithm=dapo", "algorithm.keep.surplus=carry")
    first = made.collect()
    assert sampler.asked == [3, 6]
    assert [g.uid for g in first.groups] == ["1", "3", "5"]
    assert [g.uid for g in made.leftover] == ["7"]
    second = made.collect()
    assert sampler.asked[2] == 2  # the leftover group is one of the three
    assert [g.uid for g in second.groups][:2] == ["7", "9"]
    assert second.metrics["sampling/carried"] == 1
    assert second.groups[0].rollouts[0].completion.version == 2  # from the second sampling; the others are later
    assert "7" not in {g.uid for g in made.leftover}


def test_leftover_groups_never_wait_for_more_than_one_step() -> None:
    made, sampler = collector([*[FLAT] * 6, *[MIXED] * 9], "algorithm=dapo", "algorithm.keep.surplus=carry")
    made.prompts_per_step = 2
    made.collect()
    assert sampler.asked == [2, 4, 8]
    assert [g.uid for g in made.leftover] == ["8", "9"]  # 2 of 8 are trained on, 2 are leftover
    got = made.collect()
    assert sampler.asked == [2, 4, 8], "nothing is sampled if there are enough leftover groups"
    assert [g.uid for g in got.groups] == ["8", "9"]
    assert (got.metrics["sampling/rounds"], got.metrics["sampling/kept"]) == (0, 2)
    assert got.metrics["reward"] == 0.5
    assert made.leftover == []


def test_leftover_groups_survive_a_checkpoint(tmp_path: Path) -> None:
    made, _ = collector([(1.0, 1.0, 1.0), (0.0, 1.0, float("nan"))], "algorithm=dapo", "algorithm.keep.surplus=carry")
    made.collect()
    assert made.leftover
    saved_rollouts.save_leftover(made.leftover, tmp_path)
    assert repr(saved_rollouts.load_leftover(tmp_path, redraw, 3, ["r"], max_groups=9)) == repr(made.leftover)
    assert saved_rollouts.load_leftover(tmp_path / "elsewhere", redraw, 3, ["r"], max_groups=9) == []


def test_leftover_groups_that_do_not_fit_a_changed_config_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = collector([*[FLAT] * 3, *[MIXED] * 9], "algorithm=dapo", "algorithm.keep.surplus=carry")
    made.collect()
    assert len(made.leftover) == 3
    saved_rollouts.save_leftover(made.leftover, tmp_path)

    def other_prompt(number: int, row: int | None) -> Prompt:
        return Prompt(str(number), [2], "another seed")

    assert saved_rollouts.load_leftover(tmp_path, redraw, 2, ["r"], max_groups=3) == made.leftover
    assert caplog.text == ""
    assert saved_rollouts.load_leftover(tmp_path, redraw, 2, ["r"], max_groups=1) == made.leftover[:1]
    assert "2 of 3 leftover groups do not fit" in caplog.text
    assert saved_rollouts.load_leftover(tmp_path, redraw, 4, ["r"], max_groups=3) == []
    assert saved_rollouts.load_leftover(tmp_path, redraw, 2, ["r", "format"], max_groups=3) == []
    assert saved_rollouts.load_leftover(tmp_path, other_prompt, 2, ["r"], max_groups=3) == []


@pytest.mark.slow
def test_a_group_can_be_kept_by_one_reward_alone() -> None:
    """DAPO keeps groups by accuracy, the first reward: a difference in length says nothing about the answer."""
    rewards = {"accuracy": torch.tensor([[1.0, 1.0], [0.0, 1.0]]), "overlong": torch.tensor([[0.0, -0.5], [0.0, 0.0]])}
    assert built("algorithm=dapo").kept(rewards).tolist() == [False, True]
    for name, kept in {"accuracy": [False, True], "overlong": [True, False], "score": [True, True]}.items():
        assert built("algorithm=dapo", f"algorithm.keep.reward={name}").kept(rewards).tolist() == kept
    with pytest.raises(ConfigError, match=r"algorithm\.keep\.reward=style: choose one of .*accuracy, overlong"):
        built("algorithm=dapo", "algorithm.keep.reward=style").kept(rewards)


def test_a_reward_may_be_named_score() -> None:
    rewards = {"accuracy": torch.tensor([[0.0, 1.0]]), "score": torch.tensor([[0.5, 0.5]])}
    assert not built("algorithm=dapo", "algorithm.keep.reward=score").kept(rewards).any()


NAN = float("nan")
MIXTURE = {  # groups of the tasks: numbers, texts, texts, and one without any score
    "math": torch.tensor([[1.0, 0.0], [NAN, NAN], [NAN, NAN], [NAN, NAN]]),
    "style": torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [NAN, NAN]]),
    "judge": torch.tensor([[NAN, NAN], [1.0, 1.0], [0.0, 1.0], [NAN, NAN]]),
}


def test_groups_are_kept_by_the_accuracy_reward_of_their_task() -> None:
    dapo = built("algorithm=dapo")
    accuracy = ["math", "judge", "judge", "judge"]
    assert dapo.kept(MIXTURE, accuracy=accuracy).tolist() == [True, False, True, False]
    assert dapo.kept(MIXTURE).tolist() == [True, True, False, False], "the first reward that applies to the group"
    with pytest.raises(ValueError, match=r"accuracy: there is no reward 'jugde'; did you mean \"judge\"\?"):
        dapo.kept(MIXTURE, accuracy=["jugde"] * 4)
    with pytest.raises(ValueError, match="accuracy has 1 names, and there are 4 groups"):
        dapo.kept(MIXTURE, accuracy=["math"])


def test_difficulty_is_measured_by_the_accuracy_reward_of_the_task() -> None:
    """DGPO in a mixture measures the accuracy of a question by its own task, not by the first task."""
    dgpo = built("algorithm=dgpo", "algorithm/advantage=center")
    easy, hard = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    rewards = {"math": torch.tensor([hard, [NAN] * 4]), "judge": torch.tensor([[NAN] * 4, easy])}
    by_task = dgpo.advantages(rewards, accuracy=["math", "judge"])
    alone = dgpo.advantages({"one": torch.tensor([hard, easy])})
    torch.testing.assert_close(by_task, alone)
    assert not torch.allclose(dgpo.advantages(rewards), alone)


def test_a_collector_uses_the_accuracy_reward_of_each_groups_task() -> None:
    """Groups of the second task differ only in the reward of the first task."""
    made, _ = collector([MIXED], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    made.accuracy_rewards = {"": "r"}
    assert len(made.collect().groups) == 3
    made, sampler = collector([MIXED], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    made.reward_weights, made.accuracy_rewards = {"r": 1.0, "judge": 1.0}, {"": "judge"}
    plain = sampler.generate_and_score

    def generate_and_score(*given):
        found, stats = plain(*given)
        for rollout in (r for g in found for r in g.rollouts):
            rollout.rewards["judge"] = 1.0
        return found, stats

    sampler.generate_and_score = generate_and_score  # type: ignore[method-assign]
    assert made.collect().groups == []


def test_reward_errors_are_compared_with_a_whole_step() -> None:
    made, _ = collector([FLAT, MIXED], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    made.group_size, made.sampler.errors = 4, 1  # type: ignore[attr-defined]
    made.collect()  # 1 of 12
    made.sampler.errors = 2  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match=r"could not score 2 of 12 samples.*max_reward_errors=0\.1.*a reason"):
        made.collect()


def test_a_step_without_kept_groups_is_empty() -> None:
    made, _ = collector([FLAT], "algorithm=dapo", "algorithm.keep.max_rounds=1")
    got = made.collect()
    assert (got.groups, tuple(made.advantages(got.groups).shape)) == ([], (0, 2))


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

    def completion(k: int) -> Completion:
        n = lengths[k]
        mask = [1] * (n - 1) + [0] if k % 2 == 0 else None
        return Completion([1] * n, [-1.0] * n, "length" if cut[k] else "stop", version=1, mask=mask)

    class Fixed(Scripted):
        def generate_and_score(self, prompts, seeds, n, sampling, watch):
            return [
                Group(p, [Rollout(p, completion(k), "t", {"r": rewards[k]}) for k in (2 * i, 2 * i + 1)])
                for i, p in enumerate(prompts)
            ], ScoreStats(Counter({"": 6}))

    made, _ = collector([], "algorithm=grpo")
    made.sampler = Fixed([])  # type: ignore[assignment]
    made.draw = prompts.__getitem__
    written = [n - (k % 2 == 0) for k, n in enumerate(lengths)]
    expected = trls_metrics(written, cut, rewards, [2, 2, 7, 7, 4, 4])
    found = made.collect().metrics
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_step_without_terminated_completions_has_no_terminated_lengths() -> None:
    """One completion has no standard deviation either; a metric without a value is absent."""
    done = Completion([1, 2], [-1.0, -1.5], "length", version=1)
    rewards = {"r": 1.0, "other": NAN}
    groups = [Group(prompt(0), [Rollout(prompt(0), done, "t", rewards)])]
    metrics = rollout_metrics(groups, rewards_of(groups, list(rewards)), torch.ones(1, 1))
    assert metrics["completions/min_length"] == 2
    assert not [name for name in metrics if "terminated" in name or name.endswith("/std")]


def test_a_tool_whose_calls_all_failed_is_named_with_its_first_error() -> None:
    def group(*calls: tuple[str, str]) -> Group:
        counts = dict(Counter(name for name, _ in calls))
        failed = dict(Counter(name for name, said in calls if said.startswith("error: ")))
        said = [
            {
                "role": "tool",
                "name": name,
                "content": text,
                **({"is_error": True} if text.startswith("error: ") else {}),
            }
            for name, text in calls
        ]
        done = Completion([1], [-1.0], "stop", version=1, episode=Episode(said, 2, {}, None, counts, failed))
        return Group(prompt(0), [Rollout(prompt(0), done, "t", {"r": 1.0})])

    broken, works, single = ("search", "error: KeyError: 'url'"), ("add", "3"), ("once", "error: x")
    unknown = ("unknown", "error: y")
    groups = [group(broken, ("add", "error: no"), single), group(("search", "error: other"), works, unknown)]
    (sentence,) = ToolUse.of([*groups, group(unknown)]).warnings().values()
    assert sentence.startswith("all 2 calls of search failed, the first with KeyError: 'url'; ")


def test_seeds_differ_by_run_and_draw() -> None:
    seeds = {derive_seed(run, draw) for run in range(3) for draw in range(100)}
    assert len(seeds) == 300
    assert derive_seed(1, 2) == derive_seed(1, 2)
