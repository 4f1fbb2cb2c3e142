"""What evaluations sample: the run's text conditions at temperatures of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpocli.data import Completion, Group, Prompt, Rollout, Sampling
from grpocli.rewards.scoring import Tally
from grpocli.training.evaluate import Evaluator


class Judge:
    def judge(self, tally: Tally) -> None:
        return


class Recording:
    """A sampler whose completions are right, wrong and not judged in turn."""

    scorer = Judge()

    def __init__(self) -> None:
        self.asked: list[tuple[int, Sampling]] = []

    def groups(self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling) -> Any:
        self.asked.append((n, sampling))
        scores = [1.0, 0.0, math.nan, 0.5]
        done = Completion([1, 2], [0.0, 0.0], "stop", 1)
        return [Group(p, [Rollout(p, done, "", {"right": scores[i % 4]}) for i in range(n)]) for p in prompts], Tally()


def test_evaluations_keep_what_decides_the_answer_and_its_end() -> None:
    sampling = Sampling(
        50, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.2, stop=("\n",), regex="a+"
    )
    recording: Any = Recording()
    metrics = Evaluator(recording, [Prompt("0", [1], "?")], 4, {"": "right"}, sampling, seed=0)()
    assert recording.asked == [
        (4, Sampling(50, repetition_penalty=1.2, stop=("\n",), regex="a+")),
        (1, Sampling(50, temperature=0.0, repetition_penalty=1.2, stop=("\n",), regex="a+")),
    ]
    assert metrics == {"eval/accuracy": 1 / 3, "eval/accuracy_greedy": 1.0, "eval/mean_length": 2.0}


def test_several_tasks_have_their_own_judges_and_results() -> None:
    class OfTwo(Recording):
        def groups(self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling) -> Any:
            done = Completion([1, 2], [0.0, 0.0], "stop", 1)
            scores = {"sums": {"right": 1.0, "other": math.nan}, "words": {"right": math.nan, "other": 0.5}}
            return [Group(p, [Rollout(p, done, "", scores[p.task])] * n) for p in prompts], Tally()

    prompts = [Prompt("0", [1], "?", {"task_name": "sums"}), Prompt("1", [1], "?", {"task_name": "words"})]
    sampler: Any = OfTwo()
    found = Evaluator(sampler, prompts, 2, {"sums": "right", "words": "other"}, Sampling(8), seed=0)()
    assert found["eval/accuracy"] == 0.5
    assert (found["eval/sums/accuracy"], found["eval/words/accuracy"]) == (1.0, 0.0)
    assert found["eval/words/accuracy_greedy"] == 0.0
    assert found["eval/sums/mean_length"] == 2.0
