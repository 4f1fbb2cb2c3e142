"""Accuracy on held-out problems: the evaluation during training, pass@k and maj@k."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpocli.progress import UNWATCHED, Watch
from grpocli.rewards.reward import BaseReward, Sample
from grpocli.rollout.sampling import derive_seed
from grpocli.training.collector import Sampler
from grpocli.types import Group, Prompt, Sampling


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The unbiased estimate of pass@k from n = `samples`, of which c = `right` are right: 1 - C(n - c, k) / C(n, k).

    arXiv 2107.03374, equation 1. 1 <= k <= samples.
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(votes: Sequence[str], right: Sequence[bool]) -> float:
    """1 if the most frequent answer is right, else 0; ties count as their mean, the expectation of a random choice.

    votes: the answer of each sample. right: whether it is right; equal answers that differ in this count as their mean.
    """
    right_by_vote: dict[str, list[bool]] = defaultdict(list)
    for vote, verdict in zip(votes, right, strict=True):
        right_by_vote[vote].append(verdict)
    longest = max(map(len, right_by_vote.values()))
    return float(np.mean([np.mean(same_vote) for same_vote in right_by_vote.values() if len(same_vote) == longest]))


@dataclass(frozen=True, slots=True)
class AccuracyRewards:
    """The rewards that decide whether an answer is right."""

    names: Mapping[str, str]
    """By task."""
    rewards: Mapping[str, BaseReward]
    """By name."""

    def name(self, group: Group) -> str:
        return self.names[group.prompt.task]

    def right(self, group: Group) -> list[float]:
        """1 or 0 for each rollout; NaN if it was not scored."""
        scores = (rollout.rewards[self.name(group)] for rollout in group.rollouts)
        return [math.nan if math.isnan(score) else float(score >= 1) for score in scores]

    def by_problem(self, groups: Sequence[Group]) -> dict[str, float]:
        """The share of right samples of each question that has a scored one, by its `problem_id`."""
        known = ((group, _known(self.right(group))) for group in groups)
        return {problem_id(group.prompt): mean_or_nan(right) for group, right in known if right}

    def majority(self, group: Group, max_tokens: int) -> float:
        """1 if the most frequent answer of a group is right, else 0; see `majority`."""
        name = self.name(group)
        known = [rollout for rollout in group.rollouts if not math.isnan(rollout.rewards[name])]
        votes = self.rewards[name].votes([Sample.of(rollout, max_tokens) for rollout in known])
        return majority(votes, [rollout.rewards[name] >= 1 for rollout in known])


def question_scores(
    accuracy_rewards: AccuracyRewards, greedy: Sequence[Group], sampled: Sequence[Group], max_tokens: int
) -> dict[str, list[float]]:
    """A value for each question with a scored sample: `greedy`, `mean@N`, `pass@K` and `maj@N`.

    greedy: groups of one completion each. sampled: groups of N completions each; K is 2, 4, 8 ... and N.
    """
    scores: dict[str, list[float]] = {}
    if greedy:
        scores["greedy"] = _known([right for group in greedy for right in accuracy_rewards.right(group)])
    if not sampled:
        return scores
    samples = len(sampled[0].rollouts)
    known = [(group, right) for group in sampled if (right := _known(accuracy_rewards.right(group)))]
    scores[f"mean@{samples}"] = [mean_or_nan(right) for _, right in known]
    k = 1
    while k < samples:
        k = min(2 * k, samples)
        scores[f"pass@{k}"] = [pass_at_k(int(sum(right)), len(right), k) for _, right in known if len(right) >= k]
    if samples > 1:
        scores[f"maj@{samples}"] = [accuracy_rewards.majority(group, max_tokens) for group, _ in known]
    return scores


def problem_id(prompt: Prompt) -> str:
    """The same for the same problem in evaluations of any run: a digest of its task and its text."""
    text = json.dumps([prompt.task, prompt.text], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def mean_or_nan(values: Sequence[float]) -> float:
    """The mean; NaN without values."""
    return float(np.mean(values)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The evaluation during training: the numbers of `grpocli eval` at temperature 1, as `eval/...` metrics.

    `eval/accuracy` is mean@N with N = `samples`; with several tasks there is `eval/TASK/accuracy` and so on as well. A
    completion is right if the accuracy reward of its task scores 1 or more. Every evaluation of a run uses the same
    problems and seeds, so that two of them differ only by the weights.
    """

    sampler: Sampler
    prompts: Sequence[Prompt]
    samples: int
    accuracy_rewards: AccuracyRewards
    sampling: Sampling
    """The run's. Penalty, stop strings, regex and schema are kept, because they change greedy answers, too."""
    seed: int
    watch: Watch = UNWATCHED
    """Gets the number of completions; it may cancel the evaluation."""
    target_loss: Callable[[], dict[str, Any]] | None = None
    """The loss on the held-out problems' answers, in supervised training. Without rewards it is all there is."""

    @property
    def samples_answers(self) -> bool:
        """Whether it measures an accuracy."""
        return bool(self.prompts and self.accuracy_rewards.names)

    def __call__(self) -> dict[str, Any]:
        """The metrics, and `eval/accuracy_by_problem` and `eval/loss_by_problem`; empty without problems.

        Collective. Raises Cancelled, in every process, if `watch` is cancelled.
        """
        loss = {f"eval/{name}": value for name, value in self.target_loss().items()} if self.target_loss else {}
        if loss:
            losses = loss["eval/loss_by_problem"]
            loss["eval/loss_by_problem"] = {problem_id(self.prompts[i]): value for i, value in losses.items()}
        if not self.samples_answers:
            return loss
        untouched = replace(self.sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        sampled = self._groups(untouched, self.samples, 0)
        greedy = self._groups(replace(untouched, temperature=0.0), 1, self.samples)
        metrics = self._results("eval", sampled, greedy)
        for task in self.accuracy_rewards.names if len(self.accuracy_rewards.names) > 1 else ():
            own = ([group for group in groups if group.prompt.task == task] for groups in (sampled, greedy))
            metrics |= self._results(f"eval/{task}", *own)
        return metrics | loss

    def _results(self, name: str, sampled: Sequence[Group], greedy: Sequence[Group]) -> dict[str, Any]:
        done = [rollout.completion for group in (*greedy, *sampled) for rollout in group.rollouts]
        known = {"greedy": "accuracy_greedy", f"mean@{self.samples}": "accuracy"}
        values = question_scores(self.accuracy_rewards, greedy, sampled, self.sampling.max_tokens)
        scores = {f"{name}/{known.get(score, score)}": mean_or_nan(own) for score, own in values.items()}
        lengths = {
            f"{name}/mean_length": float(np.mean([one.written for one in done])),
            f"{name}/truncated": float(np.mean([one.truncated for one in done])),
        }
        problems = self.accuracy_rewards.by_problem(sampled or greedy)
        by_problem = {f"{name}/accuracy_by_problem": problems} if name == "eval" else {}
        return {**scores, **lengths, **by_problem, f"{name}/problems": len(sampled)}

    def _groups(self, sampling: Sampling, n: int, before: int) -> list[Group]:
        """Groups of n completions of each problem. before: completions of each problem so far, for the progress."""
        seeds = eval_seeds(self.seed, self.prompts)
        watch = self.watch.part(before * len(self.prompts), (self.samples + 1) * len(self.prompts))
        groups, stats = self.sampler.generate_and_score(self.prompts, seeds, n, sampling, watch)
        self.sampler.scorer.check_errors(stats)
        return groups


def eval_seeds(seed: int, prompts: Sequence[Prompt]) -> list[int]:
    """A seed for each problem, by its number within its task, as `grpocli eval` evaluates task by task."""
    numbers: dict[str, int] = defaultdict(int)
    seeds = []
    for prompt in prompts:
        seeds.append(derive_seed(seed, 2**32 - 1, numbers[prompt.task]))
        numbers[prompt.task] += 1
    return seeds
