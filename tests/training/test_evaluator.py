"""The evaluation during training: its sampling parameters, rewards and progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpocli.config.schema import Eval, StopAt
from grpocli.rewards.rule_based import ExactMatch
from grpocli.rewards.scorer import ScoreStats
from grpocli.training.accuracy import AccuracyRewards, Evaluator, eval_seeds, problem_id
from grpocli.types import Completion, Group, Prompt, Rollout, Sampling


class Recording:
    """A sampler whose completions are right, wrong and not scored, in turn."""

    scorer = SimpleNamespace(check_errors=lambda stats: None)

    def __init__(self, by_task: dict[str, dict[str, float]] | None = None) -> None:
        """by_task: the scores of every completion of a task."""
        self.asked, self.by_task = list[tuple[int, Sampling]](), by_task

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Any = None
    ) -> Any:
        self.asked.append((n, sampling))
        if watch:
            watch.progress(len(prompts) * n, len(prompts) * n, "completions")
        scores = [1.0, 0.0, math.nan, 0.5]
        done = Completion([1, 2], [0.0, 0.0], "stop", 1)
        found = self.by_task or {p.task: {} for p in prompts}
        return [
            Group(p, [Rollout(p, done, "", found[p.task] or {"right": scores[i % 4]}) for i in range(n)])
            for p in prompts
        ], ScoreStats()


def test_evaluations_keep_penalties_and_stop_strings_but_not_the_temperature() -> None:
    kept = Sampling(50, repetition_penalty=1.2, stop=("\n",), regex="a+")
    sampling = replace(kept, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    recording, rewards = cast("Any", Recording()), AccuracyRewards({"": "right"}, {"right": ExactMatch()})
    metrics = Evaluator(recording, [Prompt("0", [1], "?")], 4, rewards, sampling, seed=0)()
    assert recording.asked == [(4, kept), (1, replace(kept, temperature=0.0))]
    assert metrics == {
        "eval/accuracy": 1 / 3,
        "eval/accuracy_by_problem": {problem_id(Prompt("1", [2], "?")): 1 / 3},
        "eval/accuracy_greedy": 1.0,
        "eval/pass@2": pytest.approx(2 / 3),  # one of three scored completions is right
        "eval/pass@4": pytest.approx(math.nan, nan_ok=True),
        "eval/maj@4": pytest.approx(1 / 3),  # all give the same answer, and one of them is right
        "eval/mean_length": 2.0,
        "eval/truncated": 0.0,
        "eval/problems": 1,
    }


@pytest.mark.parametrize(("samples", "tasks"), [(1, [""]), (5, [""]), (8, ["sums", "words"])])
def test_the_accuracies_that_may_end_a_run_are_those_of_an_evaluation(samples: int, tasks: list[str]) -> None:
    prompts = [Prompt(task, [1], "?", {"task_name": task}) for task in tasks]
    rewards = AccuracyRewards(dict.fromkeys(tasks, "right"), {"right": ExactMatch()})
    recording: Any = Recording()
    found = Evaluator(recording, prompts, samples, rewards, Sampling(8), seed=0)()
    names = [name.removeprefix("eval/") for name in found]
    others = ("mean_length", "truncated", "problems", "by_problem")
    assert sorted(Eval(samples=samples).accuracies(tasks)) == sorted(n for n in names if not n.endswith(others))


def test_a_run_ends_at_the_threshold_and_not_below_it() -> None:
    stop_at = StopAt("eval/accuracy", 0.5)
    assert (stop_at.name, StopAt("accuracy", 0.5).name) == ("eval/accuracy", "eval/accuracy")
    assert [stop_at.reached_by({"eval/accuracy": value}) for value in (0.5, 0.75)] == [0.5, 0.75]
    others = [{"eval/accuracy": value} for value in (0.4999, math.nan, "1")]
    for results in (None, {}, {"eval/pass@4": 0.9}, *others):
        assert stop_at.reached_by(results) is None
    assert StopAt().reached_by({"eval/accuracy": 1.0}) is None
    assert StopAt("accuracy", 0.0).reached_by({"eval/accuracy": 0.0}) == 0.0


def test_several_tasks_have_their_own_accuracy_rewards_and_results() -> None:
    scores = {"sums": {"right": 1.0, "other": math.nan}, "words": {"right": math.nan, "other": 0.5}}
    prompts = [Prompt("0", [1], "?", {"task_name": "sums"}), Prompt("1", [1], "?", {"task_name": "words"})]
    sampler: Any = Recording(scores)
    names = {"sums": "right", "words": "other"}
    accuracy_rewards = AccuracyRewards(names, {name: ExactMatch() for name in names.values()})
    assert len(set(eval_seeds(0, prompts))) == 1  # each is the first problem of its task
    assert len(set(eval_seeds(0, [*prompts, *prompts]))) == 2
    found = Evaluator(sampler, prompts, 2, accuracy_rewards, Sampling(8), seed=0)()
    assert found["eval/accuracy"] == 0.5
    assert (found["eval/sums/accuracy"], found["eval/words/accuracy"]) == (1.0, 0.0)
    assert found["eval/words/accuracy_greedy"] == 0.0
    assert found["eval/sums/mean_length"] == 2.0
    assert (found["eval/maj@2"], found["eval/sums/pass@2"], found["eval/words/pass@2"]) == (0.5, 1.0, 0.0)
