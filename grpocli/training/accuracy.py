"""Accuracy on held-out problems: the evaluation during training; pass@k, maj@k and their confidence intervals."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from grpocli.progress import UNWATCHED, Watch
from grpocli.rewards.reward import BaseReward, Correctness, Sample
from grpocli.rollout.sampling import derive_seed
from grpocli.training.collector import Sampler
from grpocli.types import Group, Prompt, Rollout, Sampling

AGREEING = 2
"""Pseudo-questions of `interval`: two keep its coverage above 90 % for ten questions and sixteen samples."""


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The unbiased estimate of pass@k from n = `samples`, of which c = `right` are right: 1 - C(n - c, k) / C(n, k).

    arXiv 2107.03374, equation 1. Raises ValueError unless 1 <= k <= samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
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


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean over questions, given one value between 0 and 1 for each question.

    Wilson's score interval (1927). A value of 0 or 1 counts as one draw; a mean over several samples counts as more, by
    the design effect: the variance of 0/1 outcomes divided by that of the values (Kish, Survey Sampling, 1965). The
    latter is estimated with `AGREEING` additional questions whose samples all agree, because few questions give a poor
    estimate. Raises ValueError without values.
    """
    n = len(values)
    if not n:
        raise ValueError("a confidence interval needs a value")
    mean = min(max(float(np.mean(values)), 0.0), 1.0)
    of_outcomes = mean * (1 - mean)
    apart = float(np.square(np.asarray(values) - mean).sum()) + AGREEING * of_outcomes
    draws = n * max(1.0, of_outcomes * (n - 1 + AGREEING) / apart) if apart > 0 else n
    z = NormalDist().inv_cdf(0.975)
    center, reach = mean + z**2 / (2 * draws), z * math.sqrt(of_outcomes / draws + (z / (2 * draws)) ** 2)
    low, high = ((center + side * reach) / (1 + z**2 / draws) for side in (-1, 1))
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions; low, high: its 95 % confidence interval (`interval`)."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The estimate from one value for each question; NaN without questions."""
        if not values:
            return cls(math.nan, math.nan, math.nan)
        return cls(float(np.mean(values)), *interval(values))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The accuracy of one task, or of several together.

    questions: those with a scored sample. failed: samples that the reward could not score, which are left out. scores:
    `greedy`, `mean@N`, `pass@K`, `maj@N`. mean_length: tokens that the model wrote. truncated: the share of samples
    that were cut off. by_problem: the share of right samples of each question (`problem_id`), greedy ones only if there
    are no others.
    """

    task: str
    questions: int
    failed: int
    mean_length: float
    truncated: float
    scores: dict[str, Estimate] = field(default_factory=dict)
    by_problem: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The result in JSON types; unknown numbers are null."""
        values: dict[str, Any] = _without_nan(asdict(self))
        return values


@dataclass(frozen=True, slots=True)
class AccuracyRewards:
    """The rewards that decide whether an answer is right. names: by task. rewards: by name."""

    names: Mapping[str, str]
    rewards: Mapping[str, BaseReward]

    def name(self, group: Group) -> str:
        return self.names[group.prompt.task]

    def right(self, group: Group) -> list[float]:
        """1 or 0 for each rollout; NaN if it was not scored."""
        scores = (rollout.rewards[self.name(group)] for rollout in group.rollouts)
        return [math.nan if math.isnan(score) else float(score >= 1) for score in scores]

    def doubts(self, groups: Sequence[Group]) -> dict[str, str]:
        """Why scores cannot measure accuracy: they are all equal, or of another scale; by reward."""
        found = {}
        for name in dict.fromkeys(self.names.values()):
            of_reward = (one.rewards[name] for group in groups if self.name(group) == name for one in group.rollouts)
            scores = [score for score in of_reward if not math.isnan(score)]
            if not scores or isinstance(self.rewards[name], Correctness):
                continue
            low, high, kinds = min(scores), max(scores), len(set(scores))
            if kinds == 1 < len(scores) or (kinds > 2 and (low < 0 or high > 1)):
                scored = f"the score {low:g}" if kinds == 1 else f"scores from {low:g} to {high:g}"
                known = f", unless {'every' if low else 'no'} answer was right" if kinds == 1 and low in (0, 1) else ""
                found[name] = (
                    f"reward.{name} gave all {len(scores)} completions of the evaluation {scored}, so it does not "
                    f"measure accuracy (the share of scores of 1 or more){known}; "
                    "eval.reward=NAME chooses the reward that does"
                )
        return found

    def majority(self, group: Group, max_tokens: int) -> float:
        name = self.name(group)
        known: list[Rollout] = [rollout for rollout in group.rollouts if not math.isnan(rollout.rewards[name])]
        votes = self.rewards[name].votes([Sample.of(rollout, max_tokens) for rollout in known])
        return majority(votes, [rollout.rewards[name] >= 1 for rollout in known])


def task_result(
    task: str, accuracy_rewards: AccuracyRewards, greedy: Sequence[Group], sampled: Sequence[Group], max_tokens: int
) -> TaskResult:
    """The result of one task's groups, or of several tasks' together. greedy: groups of one completion each."""
    rollouts = [rollout for group in [*greedy, *sampled] for rollout in group.rollouts]
    done = [rollout.completion for rollout in rollouts]
    scores: dict[str, Estimate] = {}
    if greedy:
        scores["greedy"] = Estimate.of(
            [mean for group in greedy if not math.isnan(mean := _mean(accuracy_rewards.right(group)))]
        )
    if sampled:
        scores |= _of_samples(sampled, accuracy_rewards, max_tokens)
    return TaskResult(
        task=task,
        questions=len({g.uid for g in [*greedy, *sampled] if _scored(accuracy_rewards.right(g))}),
        failed=sum(math.isnan(right) for group in [*greedy, *sampled] for right in accuracy_rewards.right(group)),
        mean_length=float(np.mean([completion.written for completion in done])),
        truncated=float(np.mean([completion.truncated for completion in done])),
        scores=scores,
        by_problem={
            problem_id(group.prompt): _mean(right)
            for group in sampled or greedy
            if _scored(right := accuracy_rewards.right(group))
        },
    )


def problem_id(prompt: Prompt) -> str:
    """The same for the same problem in evaluations of any run: a digest of its task and its text."""
    text = json.dumps([prompt.task, prompt.text], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_samples(groups: Sequence[Group], accuracy_rewards: AccuracyRewards, max_tokens: int) -> Mapping[str, Estimate]:
    samples = len(groups[0].rollouts)
    scored = [(group, accuracy_rewards.right(group)) for group in groups]
    scored = [(group, right) for group, right in scored if _scored(right)]
    scores = {f"mean@{samples}": Estimate.of([_mean(right) for _, right in scored])}
    k = 1
    while (k := min(2 * k, samples)) > 1:
        counts = [(int(np.nansum(right)), len(_scored(right))) for _, right in scored]
        scores[f"pass@{k}"] = Estimate.of([pass_at_k(c, n, k) for c, n in counts if n >= k])
        if k == samples:
            break
    if samples > 1:
        scores[f"maj@{samples}"] = Estimate.of([accuracy_rewards.majority(group, max_tokens) for group, _ in scored])
    return scores


def _scored(right: Sequence[float]) -> list[float]:
    return [value for value in right if not math.isnan(value)]


def _mean(right: Sequence[float]) -> float:
    scored = _scored(right)
    return float(np.mean(scored)) if scored else math.nan


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The evaluation during training: the numbers of `grpocli eval` at temperature 1, as `eval/...` metrics.

    `eval/accuracy` is mean@N with N = `samples`; with several tasks there is `eval/TASK/accuracy` and so on as well. A
    completion is right if the accuracy reward of its task scores 1 or more. Every evaluation of a run uses the same
    problems and seeds, so that two of them differ only by the weights.

    target_loss: the loss on the held-out problems' answers, in supervised training. Without rewards it is all there is.
    sampling: the run's. Repetition penalty, stop strings, regex and schema are kept, because they change greedy answers
    too; temperature and truncation are not. watch: gets the number of completions; it may cancel the evaluation.
    warn: gets the `doubts` about the accuracy rewards.
    """

    sampler: Sampler
    prompts: Sequence[Prompt]
    samples: int
    accuracy_rewards: AccuracyRewards
    sampling: Sampling
    seed: int
    watch: Watch = UNWATCHED
    target_loss: Callable[[], dict[str, Any]] | None = None
    warn: Callable[[Mapping[str, str]], None] = lambda doubts: None

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
        self.warn(self.accuracy_rewards.doubts([*sampled, *greedy]))
        metrics = self._results("eval", sampled, greedy)
        for task in self.accuracy_rewards.names if len(self.accuracy_rewards.names) > 1 else ():
            metrics |= self._results(f"eval/{task}", *(_of_task(task, groups) for groups in (sampled, greedy)))
        return metrics | loss

    def _results(self, name: str, sampled: Sequence[Group], greedy: Sequence[Group]) -> dict[str, Any]:
        result = task_result(name, self.accuracy_rewards, greedy, sampled, self.sampling.max_tokens)
        known = {"greedy": "accuracy_greedy", f"mean@{self.samples}": "accuracy"}
        scores = {f"{name}/{known.get(score, score)}": estimate.value for score, estimate in result.scores.items()}
        lengths = {f"{name}/mean_length": result.mean_length, f"{name}/truncated": result.truncated}
        by_problem = {f"{name}/accuracy_by_problem": result.by_problem} if name == "eval" else {}
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


def _of_task(name: str, groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.prompt.task == name]
