"""Accuracy on held-out problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpocli.progress import UNWATCHED, Watch
from grpocli.rollout.seeds import seed_of
from grpocli.training.accuracy import AccuracyRewards, task_result
from grpocli.training.collect import Sampler
from grpocli.types import Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The numbers of `grpocli eval`, at temperature 1: `eval/accuracy` is its mean@N with `samples` of each problem.

    With several tasks `eval/TASK/accuracy` and so on as well. A completion is right where the accuracy reward of its
    task (`accuracy_rewards`) scores 1 or more. Every evaluation of a run uses the same problems and seeds, so that two
    of them differ by the weights alone.

    sampling: the run's. What decides which answer is the likeliest, and where it ends, is kept: the repetition
    penalty, stop strings, regex or schema. Temperature and truncation are not: neither changes a greedy answer.
    watch: called with the count of completions; it may cancel the rest.
    """

    sampler: Sampler
    prompts: Sequence[Prompt]
    samples: int
    accuracy_rewards: AccuracyRewards
    sampling: Sampling
    seed: int
    watch: Watch = UNWATCHED

    def __call__(self) -> dict[str, float]:
        """Collective. Empty where there are no problems. Raises Cancelled, in every process, where `watch` says so."""
        if not self.prompts:
            return {}
        untouched = replace(self.sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        sampled = self._groups(untouched, self.samples, 0)
        greedy = self._groups(replace(untouched, temperature=0.0), 1, self.samples)
        found = self._results("eval", sampled, greedy)
        for task in self.accuracy_rewards.names if len(self.accuracy_rewards.names) > 1 else ():
            found |= self._results(f"eval/{task}", *(_of_task(task, groups) for groups in (sampled, greedy)))
        return found

    def _results(self, name: str, sampled: Sequence[Group], greedy: Sequence[Group]) -> dict[str, float]:
        result = task_result(name, self.accuracy_rewards, greedy, sampled, self.sampling.max_tokens)
        known = {"greedy": "accuracy_greedy", f"mean@{self.samples}": "accuracy"}
        scores = {f"{name}/{known.get(score, score)}": found.value for score, found in result.scores.items()}
        return {**scores, f"{name}/mean_length": result.mean_length, f"{name}/truncated": result.truncated}

    def _groups(self, sampling: Sampling, n: int, before: int) -> list[Group]:
        """n completions of each problem. before: how many of each there are already."""
        seeds = eval_seeds(self.seed, self.prompts)
        watch = self.watch.part(before * len(self.prompts), (self.samples + 1) * len(self.prompts))
        groups, tally = self.sampler.groups(self.prompts, seeds, n, sampling, watch)
        self.sampler.scorer.check_errors(tally)
        return groups


def eval_seeds(seed: int, prompts: Sequence[Prompt]) -> list[int]:
    """By the number of each problem within its task: `grpocli eval` evaluates one task after the other."""
    numbers: dict[str, int] = defaultdict(int)
    seeds = []
    for prompt in prompts:
        seeds.append(seed_of(seed, 2**32 - 1, numbers[prompt.task]))
        numbers[prompt.task] += 1
    return seeds


def _of_task(name: str, groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.prompt.task == name]
