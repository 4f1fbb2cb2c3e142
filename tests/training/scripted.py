"""A collector whose sampler gives scripted rewards, for tests of what a step draws, keeps, trains on and records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from composed import built

from grpocli.progress import UNWATCHED, Watch
from grpocli.rewards.rule_based import ExactMatch
from grpocli.rewards.scorer import RewardStats, Scorer, ScoreStats
from grpocli.training.collector import Collector
from grpocli.training.schedule import Schedule
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Sampling

IDS = [5, 6, 7, 8, 9, 10]
MIXED, FLAT = (0.0, 1.0), (1.0, 1.0)
"""The rewards of a group's completions: with and without a difference."""


def varied(number: int, k: int) -> Completion:
    """Completion k of prompt `number`: lengths, ends and tokens of an environment vary."""
    ids = IDS[: 1 + (number + 2 * k) % len(IDS)]
    episode = Episode([{"role": "assistant", "content": "x"}], 1) if number % 2 else None
    mask = [int(i != 1) for i in range(len(ids))] if episode else None
    ended = "length" if len(ids) == len(IDS) else "stop"
    return Completion(ids, [-1.0] * len(ids), ended, 1, mask, episode=episode)


class Scripted:
    """A sampler that gives the n-th prompt the n-th group of rewards, again and again."""

    def __init__(
        self,
        rewards: Sequence[Sequence[float | tuple[float, ...]]],
        completion: Callable[[int, int], Completion] = varied,
    ) -> None:
        """rewards: of each completion, one or one of each name."""
        self.rewards, self.completion = rewards, completion
        self.names: tuple[str, ...] = ("r",)
        self.errors = 0
        """Samples that the reward could not score."""
        self.version: int | None = None
        """The weight version of completions; None: the number of the call."""
        self.asked: list[int] = []
        """The number of prompts in each call."""
        self.scorer = Scorer({"r": ExactMatch()}, max_errors=0.1)
        self.world = SimpleNamespace(is_main=True)

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch = UNWATCHED
    ) -> tuple[list[Group], ScoreStats]:
        self.asked.append(len(prompts))
        watch.progress(1, 2, "completions", "token 3")
        groups = [Group(prompt, self.rollouts(prompt)) for prompt in prompts]
        found = RewardStats(errors=self.errors, first_error="a reason")
        return groups, ScoreStats(Counter({"": len(prompts) * n}), 1.0, {("r", ""): found})

    def rollouts(self, prompt: Prompt) -> list[Rollout]:
        rollouts, number = [], int(prompt.uid)
        for k, values in enumerate(self.rewards[number % len(self.rewards)]):
            done = self.completion(number, k)
            version = len(self.asked) if self.version is None else self.version
            done = Completion(done.token_ids, done.logprobs, done.finish_reason, version, done.mask, None, done.episode)
            scores = values if isinstance(values, tuple) else (values,)
            rollouts.append(Rollout(prompt, done, "t", dict(zip(self.names, scores, strict=True))))
        return rollouts


def prompt(number: int) -> Prompt:
    return Prompt(str(number), [1], "p")


def collector_of(sampler: Scripted, *overrides: str, prompts: int = 3, **scheduling: Any) -> Collector:
    algorithm = built(*overrides)
    keep = algorithm.keep
    made = {"max_staleness": 0, "steps": 99, "max_rounds": keep.max_rounds, "carry": keep.surplus == "carry"}
    schedule = Schedule(prompts, **{**made, **scheduling})
    return Collector(
        sampler=sampler,  # type: ignore[arg-type]
        algorithm=algorithm,
        draw=prompt,
        reward_weights=dict.fromkeys(sampler.names, 1.0),
        schedule=schedule,
        group_size=2,
        sampling=Sampling(len(IDS)),
        seed=0,
    )
