"""Sampling and scoring: from prompts to the groups that a step trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpocli.data import Group, Prompt, Request, Rollout, Sampling
from grpocli.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from grpocli.algorithm import Algorithm
    from grpocli.rewards.scoring import Scorer
    from grpocli.rollout.engine import Engine
    from grpocli.training.world import World


def seed_of(*parts: int) -> int:
    """A seed for one prompt's completions from the run's seed and counters: nothing else to save or restore."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def rewards_of(groups: Sequence[Group], names: Sequence[str]) -> dict[str, Tensor]:
    """{name: [P, G]}, NaN where a reward does not apply."""
    return {
        name: torch.tensor([[r.rewards[name] for r in g.rollouts] for g in groups], dtype=torch.float64)
        for name in names
    }


@dataclass(slots=True)
class Sampler:
    """Completions of prompts, decoded and scored, spread over the processes."""

    world: World
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer

    def groups(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling
    ) -> tuple[list[Group], dict[str, float]]:
        """A group of `n` rollouts for each prompt, in order, the same in every process; and summed metrics."""
        mine = range(self.world.rank, len(prompts), self.world.size)
        requests = [Request(prompts[i].token_ids, n, seeds[i]) for i in mine]
        sampled = self.engine.generate(requests, sampling)
        rollouts = [
            Rollout(prompts[i], done, self._text(done.token_ids))
            for i, completions in zip(mine, sampled, strict=True)
            for done in completions
        ]
        scored, counts = self.scorer.score(rollouts, sampling.max_tokens)
        done = [Rollout(r.prompt, r.completion, r.text, rewards) for r, rewards in zip(rollouts, scored, strict=True)]
        groups = [Group(prompts[i], done[k * n : (k + 1) * n]) for k, i in enumerate(mine)]
        everyone = self.world.gather_objects(list(zip(mine, groups, strict=True)))
        counted = self.world.gather_objects([counts])
        return [g for _, g in sorted(everyone, key=lambda pair: pair[0])], merged(counted)

    def _text(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def merged(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """What the processes counted: errors add up, times go on side by side."""
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: (max if name.startswith("time/") else sum)(one.get(name, 0.0) for one in counts) for name in names}


@dataclass(frozen=True, slots=True)
class Collected:
    """What one step trains on: groups, advantages [P, G] in the same order, and what was seen on the way."""

    groups: list[Group]
    advantages: Tensor
    metrics: dict[str, float]


@dataclass(slots=True)
class Collector:
    """Draws prompts and keeps the groups that the algorithm wants.

    draw: which prompt the n-th draw of the run is. draws: how many there were, the only state to save.
    """

    sampler: Sampler
    algorithm: Algorithm
    draw: Callable[[int], Prompt]
    weights: dict[str, float]
    prompts_per_step: int
    group_size: int
    sampling: Sampling
    seed: int
    draws: int = 0

    def collect(self) -> Collected:
        """Sample until there are `prompts_per_step` groups that the algorithm keeps, or its rounds are used up."""
        kept: list[Group] = []
        seen: list[Group] = []
        rounds, counts = 0, dict[str, float]()
        while len(kept) < self.prompts_per_step and rounds < self.algorithm.keep.max_rounds:
            groups, more = self._round(self.prompts_per_step - len(kept))
            counts = {k: counts.get(k, 0.0) + v for k, v in more.items()}
            kept_P = self.algorithm.keep(self._scores(groups))
            kept += [g for g, keep in zip(groups, kept_P.tolist(), strict=True) if keep]
            seen += groups
            rounds += 1
        if len(kept) < self.prompts_per_step and self.algorithm.keep.on_exhausted == "error":
            raise RunError(
                f"algorithm.keep.max_rounds={rounds}: only {len(kept)} of {self.prompts_per_step} prompts had "
                "completions of different reward; raise it, or choose easier or harder prompts"
            )
        advantages = self._advantages(kept)
        metrics = {"sampling/rounds": rounds, "sampling/kept": len(kept) / len(seen)}
        return Collected(kept, advantages, metrics | counts | self._metrics(seen))

    def _round(self, n: int) -> tuple[list[Group], dict[str, float]]:
        draws = range(self.draws, self.draws + n)
        self.draws += n
        prompts = [self.draw(d) for d in draws]
        seeds = [seed_of(self.seed, d) for d in draws]
        return self.sampler.groups(prompts, seeds, self.group_size, self.sampling)

    def _scores(self, groups: Sequence[Group]) -> Tensor:
        return self.algorithm.scores(rewards_of(groups, list(self.weights)), self.weights)

    def _advantages(self, groups: Sequence[Group]) -> Tensor:
        if not groups:
            return torch.zeros(0, self.group_size, dtype=torch.float64)
        return self.algorithm.advantages(rewards_of(groups, list(self.weights)), self.weights)

    def _metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Over everything sampled in the step, kept or not."""
        from grpocli.algorithm.statistics import constant_P1, std_P1

        scores_PG = self._scores(groups)
        done = [r.completion for g in groups for r in g.rollouts]
        lengths = [len(c.token_ids) for c in done]
        metrics = {
            "reward": scores_PG.nanmean().item(),
            "reward_std": std_P1(scores_PG).mean().item(),
            "frac_reward_zero_std": constant_P1(scores_PG).double().mean().item(),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/max_length": float(max(lengths)),
            "completions/clipped_ratio": float(np.mean([c.truncated for c in done])),
            "tokens/generated": float(sum(lengths)),
        }
        for name, values in rewards_of(groups, list(self.weights)).items():
            metrics[f"rewards/{name}/mean"] = values.nanmean().item()
        return metrics
