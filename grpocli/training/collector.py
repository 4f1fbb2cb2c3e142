"""Sampling and scoring: from prompts to the groups that a step trains on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpocli.errors import RunError
from grpocli.progress import UNWATCHED, Cancelled, Watch
from grpocli.rewards.scoring import Tally
from grpocli.rewards.streaming_scorer import EarlyScorer
from grpocli.rollout.engine import Listener
from grpocli.rollout.episodes import Episodes
from grpocli.rollout.seeds import seed_of
from grpocli.tracking.rollouts import Record
from grpocli.types import Completion, Group, Prompt, Request, Rollout, Row, Sampling, Status

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from grpocli.algorithm import Algorithm
    from grpocli.distributed.world import World
    from grpocli.environments.environment import Play
    from grpocli.rewards.scoring import Scorer
    from grpocli.rollout.engine import Engine


def rewards_of(groups: Sequence[Group], names: Sequence[str]) -> dict[str, Tensor]:
    """{name: [P, G]}, NaN where a reward does not apply."""
    return {
        name: torch.tensor([[r.rewards[name] for r in g.rollouts] for g in groups], dtype=torch.float64)
        for name in names
    }


@dataclass(slots=True)
class Sampler:
    """Completions of prompts, decoded and scored, spread over the processes. May be used by two threads.

    plays: the environments of those tasks that have one.
    """

    world: World
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    plays: Mapping[str, Play] = field(default_factory=dict)
    scoring: threading.Lock = field(default_factory=threading.Lock)  # rewards need not be safe with threads

    def groups(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch = UNWATCHED
    ) -> tuple[list[Group], Tally]:
        """A group of `n` rollouts for each prompt, in order, the same in every process; and what scoring took.

        watch: called with a count of all completions, estimated from those of this process. Raises Cancelled, in every
        process, where it was cancelled in any.
        """
        mine = range(self.world.rank, len(prompts), self.world.size)
        requests = [Request(prompts[i].token_ids, n, seeds[i], prompt=prompts[i]) for i in mine]

        def rollouts_of(k: int, completions: Sequence[Completion]) -> list[Rollout]:
            return [Rollout(prompts[mine[k]], done, self._text(done.token_ids)) for done in completions]

        with EarlyScorer(self.scorer, sampling.max_tokens, rollouts_of, self.scoring) as early:
            whole = watch.part(0, len(prompts) * n, len(prompts) / max(1, len(mine)))
            listener = Listener(early.take, whole)
            sampled = self.episodes.generate([prompts[i] for i in mine], requests, sampling, listener)
            if watch.cancellable and self.world.any(watch.cancelled()):
                raise Cancelled
            start = time.perf_counter()
            self.world.enter("reward")
        parts = [early.group(k, completions) for k, completions in enumerate(sampled)]
        rollouts = [rollout for group, _ in parts for rollout in group]
        with self.scoring:
            known = [scores for _, group in parts for scores in group]
            enter, progress = self.world.enter, watch.progress
            scored, tally = self.scorer.score(rollouts, sampling.max_tokens, known, enter, progress)
        tally = replace(tally, seconds=time.perf_counter() - start)
        self.world.enter("gather")
        done = [Rollout(r.prompt, r.completion, r.text, rewards) for r, rewards in zip(rollouts, scored, strict=True)]
        groups = [Group(prompts[i], done[k * n : (k + 1) * n]) for k, i in enumerate(mine)]
        everyone = self.world.gather_objects(list(zip(mine, groups, strict=True)))
        tallies = self.world.gather_objects([tally])
        return [g for _, g in sorted(everyone, key=lambda pair: pair[0])], reduce(Tally.beside, tallies)

    @property
    def episodes(self) -> Episodes:
        """The engine, for completions of several turns."""
        return Episodes(self.engine, self.tokenizer, self.plays, self.world)

    def _text(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The groups that one step trains on, and statistics of all that were sampled for it.

    metrics: of the step; its `num_tokens` counts this step alone, and the trainer adds those of earlier steps.
    remarks: as `Scorer.remarks`. rest: groups that the step does not train on, and why; only in the main process, which
    writes them to the rollout file. carried: uids of the groups that were sampled for the step before.
    """

    groups: list[Group]
    metrics: dict[str, float]
    remarks: Mapping[str, str] = field(default_factory=dict)
    rest: list[tuple[Status, Group]] = field(default_factory=list)
    leftover: frozenset[str] = frozenset()


MOST = 4
"""A refill asks for at most so many times `rollout.prompts_per_step`, however few groups were kept before."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """What metrics want to know of groups, kept or not: a discarded one stays in the main process alone.

    rewards: {name: [P, G]}. tasks: the name of each group's. lengths, truncated: of every completion, in tokens that
    the model wrote. turns: of those that are episodes. prompt_tokens: a prompt's count for each of its completions.
    """

    rewards: dict[str, Tensor]
    tasks: list[str]
    lengths: list[int]
    truncated: list[bool]
    turns: list[int]
    prompt_tokens: int

    @classmethod
    def of(cls, groups: Sequence[Group], names: Sequence[str]) -> RolloutStats:
        done = [r.completion for g in groups for r in g.rollouts]
        return cls(
            rewards_of(groups, names),
            [g.prompt.task for g in groups],
            [c.written for c in done],
            [c.truncated for c in done],
            [c.episode.turns for c in done if c.episode],
            sum(len(g.prompt.token_ids) * len(g.rollouts) for g in groups),
        )

    def __add__(self, other: RolloutStats) -> RolloutStats:
        rewards = {name: torch.cat([values, other.rewards[name]]) for name, values in self.rewards.items()}
        return RolloutStats(
            rewards,
            self.tasks + other.tasks,
            self.lengths + other.lengths,
            self.truncated + other.truncated,
            self.turns + other.turns,
            self.prompt_tokens + other.prompt_tokens,
        )

    @property
    def groups(self) -> int:
        return len(next(iter(self.rewards.values())))

    def metrics(self, scores_PG: Tensor) -> dict[str, float]:
        from grpocli.algorithm.statistics import constant_P1, count_P1, std_P1

        flat = {name: values.reshape(1, -1) for name, values in self.rewards.items()}
        return {
            "reward": scores_PG.nanmean().item(),
            "reward_std": std_P1(scores_PG).mean().item(),
            "frac_reward_zero_std": constant_P1(scores_PG).double().mean().item(),
            **_lengths("length", self.lengths),
            **_lengths(
                "terminated_length", [n for n, cut in zip(self.lengths, self.truncated, strict=True) if not cut]
            ),
            "completions/clipped_ratio": float(np.mean(self.truncated)),
            **({"completions/mean_turns": float(np.mean(self.turns))} if self.turns else {}),
            **{f"rewards/{name}/mean": values.nanmean().item() for name, values in flat.items()},
            **{f"rewards/{name}/std": std_P1(values).item() for name, values in flat.items() if count_P1(values) > 1},
        }

    def by_task(self, scores_PG: Tensor, accuracy_rewards: Mapping[str, str]) -> dict[str, float]:
        """Of each task's completions, the mean score and how many are right by the accuracy reward of them.

        NaN where a step has none.
        """
        found: dict[str, float] = {}
        for task, accuracy_reward in accuracy_rewards.items():
            own_P = torch.tensor([name == task for name in self.tasks])
            verdicts = self.rewards[accuracy_reward][own_P]
            right = (verdicts >= 1).double().where(~verdicts.isnan(), math.nan)
            found |= {
                f"task/{task}/reward": scores_PG[own_P].nanmean().item(),
                f"task/{task}/accuracy": right.nanmean().item(),
            }
        return found


def _lengths(name: str, lengths: Sequence[int]) -> dict[str, float]:
    """Metrics of the lengths of completions, in tokens; none without completions."""
    if not lengths:
        return {}
    found = {"mean": float(np.mean(lengths)), "min": float(min(lengths)), "max": float(max(lengths))}
    return {f"completions/{kind}_{name}": value for kind, value in found.items()}


@dataclass(slots=True)
class SamplingState:
    """What the rounds of a step have brought so far."""

    seen: RolloutStats | None = None
    kept: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    rounds: int = 0


@dataclass(slots=True)
class Collector:
    """Draws prompts and keeps the groups that the algorithm wants.

    draw: which prompt the n-th draw of the run is. accuracy_rewards: of each task, by name. State to
    save: `draws`, how many there were, and `carried`, the groups that the last step kept beyond what it wanted: they
    are the first of the next one. keeps_rest: `RolloutBatch.rest` is wanted; it is as large as a step's groups or
    several times that, at most MOST times `max_rounds` steps' worth.
    watch: called with the progress of a step's sampling.
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
    leftover: list[Group] = field(default_factory=list)
    accuracy_rewards: Mapping[str, str] = field(default_factory=dict)
    keeps_rest: bool = True
    watch: Watch = UNWATCHED

    def collect(self) -> RolloutBatch:
        """Sample until there are `prompts_per_step` groups that the algorithm keeps, or its rounds are used up.

        An error leaves the state as it was.
        """
        before = self.draws, self.leftover
        try:
            return self._collect()
        except BaseException:
            self.draws, self.leftover = before
            raise

    def _collect(self) -> RolloutBatch:
        leftover = self.leftover
        step = self._sample(self.prompts_per_step - len(leftover))
        groups = [*leftover, *step.kept]
        wanted, surplus = groups[: self.prompts_per_step], groups[self.prompts_per_step :]
        # at most one step's worth, so that all of it is used in the next: never older than one weight version
        self.leftover = surplus[: self.prompts_per_step] if self.algorithm.keep.surplus == "carry" else []
        if len(wanted) < self.prompts_per_step and self.algorithm.keep.on_exhausted == "error":
            raise RunError(
                f"algorithm.keep.max_rounds={step.rounds}: only {len(wanted)} of {self.prompts_per_step} prompts had "
                "completions of different reward; raise it, or choose easier or harder prompts"
            )
        seen = step.seen or RolloutStats.of(wanted, list(self.weights))
        metrics = {
            "sampling/rounds": step.rounds,
            "sampling/kept": len(wanted),
            "sampling/carried": len(leftover),
            "sampling/acceptance": len(step.kept) / seen.groups if step.seen else 1.0,
            "tokens/generated": float(sum(step.seen.lengths)) if step.seen else 0.0,
            "num_tokens": sum(step.seen.lengths) + step.seen.prompt_tokens if step.seen else 0,
        }
        scores_PG = self.algorithm.scores(seen.rewards, self.weights)
        shown = seen.metrics(scores_PG)
        if len(self.accuracy_rewards) > 1:
            shown |= seen.by_task(scores_PG, self.accuracy_rewards)
            shown |= {f"task/{task}/errors": float(step.tally.errors_of(task)) for task in self.accuracy_rewards}
        rest = [(Status.FILTERED, group) for group in step.filtered]
        rest += [(Status.CARRIED, group) for group in self.leftover]
        rest += [(Status.SURPLUS, group) for group in surplus[len(self.leftover) :]]
        return RolloutBatch(
            wanted,
            metrics | step.tally.metrics | shown,
            remarks=self.sampler.scorer.remarks(step.tally),
            rest=rest if self.keeps_rest else [],
            leftover=frozenset(group.uid for group in leftover),
        )

    def _sample(self, missing: int) -> SamplingState:
        """Rounds of sampling until `missing` groups are kept."""
        step = SamplingState()
        while len(step.kept) < missing and step.rounds < self.algorithm.keep.max_rounds:
            groups, tally = self._groups(self._ask(missing - len(step.kept), step), self._watch_of(step))
            step.tally = step.tally.then(tally)
            self.sampler.scorer.check_errors(step.tally, self.prompts_per_step * self.group_size)
            seen = RolloutStats.of(groups, list(self.weights))
            kept_P = self.algorithm.kept(seen.rewards, self.weights, self._accuracy(seen.tasks))
            for group, keep in zip(groups, kept_P.tolist(), strict=True):
                if keep:
                    step.kept.append(group)
                elif self.keeps_rest:
                    step.filtered.append(group)
            step.seen = step.seen + seen if step.seen else seen
            step.rounds += 1
        return step

    def _ask(self, missing: int, step: SamplingState) -> int:
        """How many prompts are likely to give `missing` groups, by the share of groups kept in this step."""
        if not step.seen:
            return missing
        expected = math.ceil(missing * step.seen.groups / max(len(step.kept), 1))
        return min(expected, MOST * self.prompts_per_step)

    def _watch_of(self, step: SamplingState) -> Watch:
        """The watch of a step's next round; of a refill it hears which one, and how far the step is."""
        if not step.rounds:
            return self.watch
        progress, kept = self.watch.progress, len(self.leftover) + len(step.kept)
        said = f"round {step.rounds + 1}, {kept} of {self.prompts_per_step} groups kept"

        def report(done: float, total: float, unit: str, detail: str = "") -> None:
            progress(done, total, unit, ", ".join(filter(None, [said, detail])))

        return replace(self.watch, progress=report)

    def _groups(self, n: int, watch: Watch) -> tuple[list[Group], Tally]:
        draws = range(self.draws, self.draws + n)
        self.draws += n
        prompts = [self.draw(d) for d in draws]
        seeds = [seed_of(self.seed, d) for d in draws]
        return self.sampler.groups(prompts, seeds, self.group_size, self.sampling, watch)

    def advantages(self, groups: Sequence[Group]) -> Tensor:
        """[P, G] of what a step trains on."""
        if not groups:
            return torch.zeros(0, self.group_size, dtype=torch.float64)
        accuracy = self._accuracy([group.prompt.task for group in groups])
        return self.algorithm.advantages(rewards_of(groups, list(self.weights)), self.weights, accuracy)

    def _accuracy(self, tasks: Sequence[str]) -> list[str] | None:
        """The name of the reward that is the accuracy of each of these tasks; None: the first reward."""
        return [self.accuracy_rewards[task] for task in tasks] if self.accuracy_rewards else None


def records_of(
    collected: RolloutBatch, rows: Sequence[Row], algorithm: Algorithm, weights: dict[str, float], step: int
) -> list[Record]:
    """A record for each completion: first those of the update, in its order, then the others.

    rows: of `collected.groups`, after the update. step: its number, from 1.
    """
    outcomes = [*((Status.TRAINED, group) for group in collected.groups), *collected.rest]
    if not outcomes:
        return []
    scores_PG = algorithm.scores(rewards_of([group for _, group in outcomes], list(weights)), weights)
    records = [
        Record(rollout, number, status, step - (group.uid in collected.leftover), score)
        for number, ((status, group), scores) in enumerate(zip(outcomes, scores_PG.tolist(), strict=True))
        for rollout, score in zip(group.rollouts, scores, strict=True)
    ]
    updated = [_updated(record, row, algorithm) for record, row in zip(records, rows, strict=False)]
    return [*updated, *records[len(rows) :]]


def _updated(record: Record, row: Row, algorithm: Algorithm) -> Record:
    """The record of a completion that was in the update, with its row's status, advantage, mask and values."""
    return replace(
        record,
        status=status_of(row, algorithm),
        advantage=row.advantage,
        loss_mask=row.mask,
        logp=None if row.logp is None else row.logp.numpy(),
        entropy=None if row.entropy is None else row.entropy.numpy(),
    )


def status_of(row: Row, algorithm: Algorithm) -> Status:
    """The status of a row that is in an update."""
    if not any(row.mask):
        return Status.MASKED
    return Status.ZERO_ADVANTAGE if row.advantage == 0 and algorithm.vanishes else Status.TRAINED
