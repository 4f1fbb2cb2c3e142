"""Generating and scoring: from prompts to the groups of rollouts that a step trains on."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpocli.environments.tools import UNKNOWN
from grpocli.errors import RewardError
from grpocli.models.loading import end_token_ids
from grpocli.progress import UNWATCHED, Cancelled, Watch
from grpocli.rewards.score_stats import ScoreStats
from grpocli.rewards.scorer import StreamingScorer
from grpocli.rollout.engine import Listener
from grpocli.rollout.multi_turn import MultiTurnEngine
from grpocli.rollout.sampling import derive_seed
from grpocli.runs.rollouts import Record
from grpocli.tasks.curriculum import Curriculum, Outcome, outcomes_of
from grpocli.types import Completion, Episode, Group, Prompt, Request, Rollout, Row, Sampling, Status

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from grpocli.algorithm import Algorithm
    from grpocli.distributed.world import World
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.rewards.scorer import Scorer
    from grpocli.rollout.engine import Engine


def rewards_of(groups: Sequence[Group], names: Sequence[str]) -> dict[str, Tensor]:
    """{name: [P, G]}, NaN where a reward does not apply."""
    return {
        name: torch.tensor([[r.rewards[name] for r in g.rollouts] for g in groups], dtype=torch.float64)
        for name in names
    }


def advantages_of(
    groups: Sequence[Group], algorithm: Algorithm, weights: dict[str, float], accuracy: Sequence[str] | None
) -> Tensor:
    """The advantages [P, G] of groups. weights: of the rewards; accuracy: each group's accuracy reward."""
    lengths = lengths_of(groups, algorithm) if algorithm.needs_lengths else None
    return algorithm.advantages(rewards_of(groups, list(weights)), weights, accuracy, lengths)


def lengths_of(groups: Sequence[Group], algorithm: Algorithm) -> Tensor:
    """The number of each completion's tokens in the loss [P, G]."""
    masked = algorithm.keep.mask_truncated
    return torch.tensor([[sum(r.completion.loss_mask(masked)) for r in g.rollouts] for g in groups])


@dataclass(slots=True)
class Sampler:
    """Generates, decodes and scores completions, spread over the processes. Two threads may use it at once.

    environments: by task name. scoring: held while rewards run, which need not be thread-safe.
    """

    world: World
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    scoring: threading.Lock = field(default_factory=threading.Lock)

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch = UNWATCHED
    ) -> tuple[list[Group], ScoreStats]:
        """One group of `n` scored rollouts for each prompt, in order and the same in every process. Collective.

        Each process generates for its share of the prompts and scores groups while others are still being generated.
        watch: gets the number of completions of all processes, estimated from this one's. Raises Cancelled in every
        process if any process was cancelled.
        """
        mine = range(self.world.rank, len(prompts), self.world.size)
        requests = [Request(prompts[i].token_ids, n, seeds[i], prompt=prompts[i]) for i in mine]

        def rollouts_of(k: int, completions: Sequence[Completion]) -> list[Rollout]:
            return [Rollout(prompts[mine[k]], done, self._text(done.token_ids)) for done in completions]

        with StreamingScorer(self.scorer, sampling.max_tokens, rollouts_of, self.scoring) as streaming:
            whole = watch.part(0, len(prompts) * n, len(prompts) / max(1, len(mine)))
            listener = Listener(streaming.add, whole)
            sampled = self.episodes.generate([prompts[i] for i in mine], requests, sampling, listener)
            if watch.cancellable and self.world.any(watch.cancelled()):
                raise Cancelled
            start = time.perf_counter()
            self.world.enter("reward")
        rollouts, stats = streaming.finish(sampled, self.world.enter, watch.progress)
        stats = replace(stats, seconds=time.perf_counter() - start)
        groups = [Group(prompts[i], rollouts[k * n : (k + 1) * n]) for k, i in enumerate(mine)]
        self.world.enter("gather")
        everyone = self.world.gather_objects(list(zip(mine, groups, strict=True)))
        all_stats = self.world.gather_objects([stats])
        return [group for _, group in sorted(everyone, key=lambda pair: pair[0])], reduce(
            ScoreStats.add_process, all_stats
        )

    @property
    def episodes(self) -> MultiTurnEngine:
        """The engine, for completions of several turns."""
        return MultiTurnEngine(self.engine, self.tokenizer, self.environments, self.world)

    def _text(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class TargetSampler(Sampler):
    """Gives the targets of the data as completions, for supervised training. Rewards do not score them.

    Evaluations use a plain `Sampler`.
    """

    __slots__ = ()

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch = UNWATCHED
    ) -> tuple[list[Group], ScoreStats]:
        """One group of `n` equal rollouts for each prompt, the same in every process. Samples nothing."""
        groups = []
        ends = end_token_ids(None, self.tokenizer)
        for prompt in prompts:
            ids = prompt.target_ids or []
            cut = len(ids) >= sampling.max_tokens and ids[-1] not in ends
            done = Completion(ids, [math.nan] * len(ids), "length" if cut else "stop", 0)
            groups.append(Group(prompt, [Rollout(prompt, done, self._text(ids)) for _ in range(n)]))
        return groups, ScoreStats()


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The groups that one step trains on, with statistics of everything that was sampled for it.

    metrics: of this step alone; the trainer adds the earlier steps to `num_tokens`. warnings: see `Scorer.warnings`.
    untrained: groups that the step does not train on, with the reason, for the rollout file; in the main process only.
    leftover_uids: of the groups that were sampled for the step before.
    """

    groups: list[Group]
    metrics: dict[str, float]
    warnings: Mapping[str, str] = field(default_factory=dict)
    untrained: list[tuple[Status, Group]] = field(default_factory=list)
    leftover_uids: frozenset[str] = frozenset()


MAX_REFILL = 4
"""A refill samples at most this many times `rollout.prompts_per_step` prompts, however few groups were kept before."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """The data of a step's groups that its metrics need, so that filtered groups can be freed.

    rewards: {name: [P, G]}. tasks: the task of each group. lengths, truncated: of each completion; lengths count tokens
    that the model wrote. turns: of each episode. prompt_tokens: each prompt counts once for each of its completions.
    calls, failures: of tools, by name. errors: the first failed result of each. callers: the number of completions of
    tasks with tools.
    """

    rewards: dict[str, Tensor]
    tasks: list[str]
    lengths: list[int]
    truncated: list[bool]
    turns: list[int]
    prompt_tokens: int
    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    callers: int = 0

    @classmethod
    def of(cls, groups: Sequence[Group], names: Sequence[str]) -> RolloutStats:
        completions = [r.completion for g in groups for r in g.rollouts]
        callers = [c.episode for c in completions if c.episode and c.episode.calls is not None]
        return cls(
            rewards=rewards_of(groups, names),
            tasks=[g.prompt.task for g in groups],
            lengths=[c.written for c in completions],
            truncated=[c.truncated for c in completions],
            turns=[c.episode.turns for c in completions if c.episode],
            prompt_tokens=sum(len(g.prompt.token_ids) * len(g.rollouts) for g in groups),
            calls=sum((Counter(episode.calls or {}) for episode in callers), Counter()),
            failures=sum((Counter(episode.failures or {}) for episode in callers), Counter()),
            errors=_first_errors(callers),
            callers=len(callers),
        )

    def __add__(self, other: RolloutStats) -> RolloutStats:
        return RolloutStats(
            rewards={name: torch.cat([values, other.rewards[name]]) for name, values in self.rewards.items()},
            tasks=self.tasks + other.tasks,
            lengths=self.lengths + other.lengths,
            truncated=self.truncated + other.truncated,
            turns=self.turns + other.turns,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            calls=self.calls + other.calls,
            failures=self.failures + other.failures,
            errors=other.errors | self.errors,
            callers=self.callers + other.callers,
        )

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.tasks)

    def metrics(self, scores_PG: Tensor | None) -> dict[str, float]:
        """Means and deviations of rewards, and lengths of completions. scores_PG: None in a run without rewards."""
        from grpocli.algorithm.statistics import constant_P1, count_P1, std_P1

        flat = {name: values.reshape(1, -1) for name, values in self.rewards.items()}
        terminated = [n for n, cut in zip(self.lengths, self.truncated, strict=True) if not cut]
        rewards = {}
        if scores_PG is not None:
            rewards = {
                "reward": scores_PG.nanmean().item(),
                "reward_std": std_P1(scores_PG).mean().item(),
                "frac_reward_zero_std": constant_P1(scores_PG).double().mean().item(),
            }
        return {
            **rewards,
            **_length_metrics("length", self.lengths),
            **_length_metrics("terminated_length", terminated),
            "completions/clipped_ratio": float(np.mean(self.truncated)),
            **({"completions/mean_turns": float(np.mean(self.turns))} if self.turns else {}),
            **self._tool_metrics(),
            **{f"rewards/{name}/mean": values.nanmean().item() for name, values in flat.items()},
            **{f"rewards/{name}/std": std_P1(values).item() for name, values in flat.items() if count_P1(values) > 1},
        }

    def _tool_metrics(self) -> dict[str, float]:
        """Calls of tools and failed ones for each completion; empty without tools."""
        if not self.callers:
            return {}
        return {
            "tools/calls": self.calls.total() / self.callers,
            "tools/failures": self.failures.total() / self.callers,
            **{f"tools/{name}/calls": count / self.callers for name, count in sorted(self.calls.items())},
            **{f"tools/{name}/failures": self.failures[name] / self.callers for name in sorted(self.calls)},
        }

    def tool_warnings(self) -> dict[str, str]:
        """A sentence for each tool whose calls all failed. A single call may be the model's mistake."""
        found = {}
        for name, count in self.calls.items():
            if count > 1 and count == self.failures[name] and name != UNKNOWN:
                reason = f", the first with {self.errors[name].removeprefix('error: ')}" if name in self.errors else ""
                found[f"tool {name}"] = f"all {count} calls of {name} failed{reason}; `grpocli rollouts RUN` shows them"
        return found

    def task_metrics(self, scores_PG: Tensor, accuracy_rewards: Mapping[str, str]) -> dict[str, float]:
        """The mean score of each task, and the share of completions that its accuracy reward calls right.

        NaN for a task without a completion in this step.
        """
        metrics: dict[str, float] = {}
        for task, accuracy_reward in accuracy_rewards.items():
            own_P = torch.tensor([name == task for name in self.tasks])
            accuracies = self.rewards[accuracy_reward][own_P]
            right = (accuracies >= 1).double().where(~accuracies.isnan(), math.nan)
            metrics |= {
                f"task/{task}/reward": scores_PG[own_P].nanmean().item(),
                f"task/{task}/accuracy": right.nanmean().item(),
            }
        return metrics


def _first_errors(episodes: Sequence[Episode]) -> dict[str, str]:
    """The first failed result of each tool."""
    found: dict[str, str] = {}
    for episode in episodes:
        for message in episode.messages:
            if message["role"] == "tool" and "is_error" in message:
                found.setdefault(message.get("name", UNKNOWN), str(message["content"]))
    return found


def _length_metrics(name: str, lengths: Sequence[int]) -> dict[str, float]:
    """Mean, minimum and maximum in tokens; empty without completions."""
    if not lengths:
        return {}
    values = {"mean": float(np.mean(lengths)), "min": float(min(lengths)), "max": float(max(lengths))}
    return {f"completions/{kind}_{name}": value for kind, value in values.items()}


@dataclass(slots=True)
class SamplingState:
    """The results of one step's sampling rounds so far."""

    stats: RolloutStats | None = None
    kept: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    score_stats: ScoreStats = field(default_factory=ScoreStats)
    outcomes: list[Outcome] = field(default_factory=list)
    rounds: int = 0


@dataclass(slots=True)
class Collector:
    """Draws prompts, has them sampled and scored, and keeps the groups that the algorithm wants.

    draw: the prompt of a draw number. curriculum: gets the outcomes of a step when it is collected, and may decide what
    `draw` gives in the next one. accuracy_rewards: the name of each task's accuracy reward. draws, collected: the
    numbers of prompts drawn and of steps collected. leftover: groups that the last step kept but did not need; the next
    step trains on them first. draws, leftover and the curriculum are saved. keeps_untrained: whether
    `RolloutBatch.untrained` is filled, with at most MAX_REFILL times `max_rounds` steps' worth of groups. watch: gets
    the progress of a step's sampling. epoch_draws: the draws of an epoch, for the metric `epoch`; None: no such metric.
    """

    sampler: Sampler
    algorithm: Algorithm
    draw: Callable[[int], Prompt]
    reward_weights: dict[str, float]
    prompts_per_step: int
    group_size: int
    sampling: Sampling
    seed: int
    draws: int = 0
    leftover: list[Group] = field(default_factory=list)
    accuracy_rewards: Mapping[str, str] = field(default_factory=dict)
    keeps_untrained: bool = True
    curriculum: Curriculum = field(default_factory=Curriculum)
    collected: int = 0
    watch: Watch = UNWATCHED
    epoch_draws: int | None = None

    def collect(self) -> RolloutBatch:
        """Sample until the algorithm has kept `prompts_per_step` groups, or its rounds are used up. Collective.

        An error leaves the state unchanged.
        """
        before, positions = (self.draws, self.leftover), self.curriculum.begin_step(self.collected)
        try:
            return self._collect()
        except BaseException:
            self.draws, self.leftover = before
            self.curriculum.go_back(positions)
            raise

    def advantages(self, groups: Sequence[Group]) -> Tensor:
        """The advantages [P, G] of the groups that a step trains on."""
        if not groups or not self.reward_weights:
            unscored_PG = torch.zeros(len(groups), self.group_size, dtype=torch.float64)
            return self.algorithm.advantage(unscored_PG) if self.algorithm.supervised else unscored_PG
        accuracy = self._accuracy([group.prompt.task for group in groups])
        return advantages_of(groups, self.algorithm, self.reward_weights, accuracy)

    def _collect(self) -> RolloutBatch:
        leftover = self.leftover
        sampled = self._sample(self.prompts_per_step - len(leftover))
        groups = [*leftover, *sampled.kept]
        wanted, surplus = groups[: self.prompts_per_step], groups[self.prompts_per_step :]
        # at most one step's worth: the next step trains on all of it, so none gets older than one weight version
        self.leftover = surplus[: self.prompts_per_step] if self.algorithm.keep.surplus == "carry" else []
        if len(wanted) < self.prompts_per_step and self.algorithm.keep.on_exhausted == "error":
            raise RewardError(
                f"algorithm.keep.max_rounds={sampled.rounds}: only {len(wanted)} of {self.prompts_per_step} prompts "
                "had completions of different reward; raise it, or choose easier or harder prompts"
            )
        metrics = self._metrics(sampled, wanted, len(leftover))
        if self.epoch_draws:
            metrics["epoch"] = self.draws / self.epoch_draws
        self.collected += 1
        self.curriculum.end_step(self.collected, sampled.outcomes)
        untrained = [(Status.FILTERED, group) for group in sampled.filtered]
        untrained += [(Status.LEFTOVER, group) for group in self.leftover]
        untrained += [(Status.SURPLUS, group) for group in surplus[len(self.leftover) :]]
        return RolloutBatch(
            wanted,
            metrics | self.curriculum.metrics(),
            warnings={
                **self.sampler.scorer.warnings(sampled.score_stats),
                **self.curriculum.warnings(),
                **(sampled.stats.tool_warnings() if sampled.stats else {}),
            },
            untrained=untrained if self.keeps_untrained else [],
            leftover_uids=frozenset(group.uid for group in leftover),
        )

    def _metrics(self, sampled: SamplingState, wanted: Sequence[Group], n_leftover: int) -> dict[str, float]:
        stats = sampled.stats or RolloutStats.of(wanted, list(self.reward_weights))
        metrics = {
            "sampling/rounds": sampled.rounds,
            "sampling/kept": len(wanted),
            "sampling/carried": n_leftover,
            "sampling/acceptance": len(sampled.kept) / stats.groups if sampled.stats else 1.0,
            "tokens/generated": float(sum(sampled.stats.lengths)) if sampled.stats and self._generates else 0.0,
            "num_tokens": sum(sampled.stats.lengths) + sampled.stats.prompt_tokens if sampled.stats else 0,
        }
        scores_PG = self.algorithm.scores(stats.rewards, self.reward_weights) if self.reward_weights else None
        metrics |= sampled.score_stats.metrics | stats.metrics(scores_PG)
        if scores_PG is not None and len(self.accuracy_rewards) > 1:
            metrics |= stats.task_metrics(scores_PG, self.accuracy_rewards)
            metrics |= {
                f"task/{task}/errors": float(sampled.score_stats.errors_of(task)) for task in self.accuracy_rewards
            }
        return metrics

    @property
    def _generates(self) -> bool:
        """Whether completions are sampled, not taken from the data."""
        return not self.algorithm.supervised

    def _sample(self, missing: int) -> SamplingState:
        """Rounds of sampling until `missing` groups are kept."""
        sampled = SamplingState()
        while len(sampled.kept) < missing and sampled.rounds < self.algorithm.keep.max_rounds:
            n_prompts = self._refill(missing - len(sampled.kept), sampled)
            groups, score_stats = self._round(n_prompts, self._watch_of(sampled))
            sampled.score_stats = sampled.score_stats.add_round(score_stats)
            self.sampler.scorer.check_errors(sampled.score_stats, self.prompts_per_step * self.group_size)
            stats = RolloutStats.of(groups, list(self.reward_weights))
            sampled.outcomes += self._outcomes(groups, stats)
            for group, keep in zip(groups, self._kept(stats), strict=True):
                if keep:
                    sampled.kept.append(group)
                elif self.keeps_untrained:
                    sampled.filtered.append(group)
            sampled.stats = sampled.stats + stats if sampled.stats else stats
            sampled.rounds += 1
        return sampled

    def _outcomes(self, groups: Sequence[Group], stats: RolloutStats) -> list[Outcome]:
        """The outcomes of the groups of tasks that have an accuracy reward."""
        names = [self.accuracy_rewards.get(task) for task in stats.tasks]
        rewards = {name: values.tolist() for name, values in stats.rewards.items() if name in names}
        known = [
            (group.prompt, rewards[name][p]) for p, (group, name) in enumerate(zip(groups, names, strict=True)) if name
        ]
        return outcomes_of([prompt for prompt, _ in known], [scores for _, scores in known])

    def _kept(self, stats: RolloutStats) -> list[bool]:
        """Whether the algorithm keeps each group; all of them in a run without rewards."""
        if not self.reward_weights:
            return [True] * stats.groups
        kept_P = self.algorithm.kept(stats.rewards, self.reward_weights, self._accuracy(stats.tasks))
        kept: list[bool] = kept_P.tolist()
        return kept

    def _refill(self, missing: int, sampled: SamplingState) -> int:
        """The number of prompts that are likely to give `missing` groups, by the share of groups kept in this step."""
        if not sampled.stats:
            return missing
        expected = math.ceil(missing * sampled.stats.groups / max(len(sampled.kept), 1))
        return min(expected, MAX_REFILL * self.prompts_per_step)

    def _watch_of(self, sampled: SamplingState) -> Watch:
        """The watch of the next round; from the second round on its detail names the round and the groups kept."""
        if not sampled.rounds:
            return self.watch
        progress, kept = self.watch.progress, len(self.leftover) + len(sampled.kept)
        round_ = f"round {sampled.rounds + 1}, {kept} of {self.prompts_per_step} groups kept"

        def report(done: float, total: float, unit: str, detail: str = "") -> None:
            progress(done, total, unit, ", ".join(filter(None, [round_, detail])))

        return replace(self.watch, progress=report)

    def _round(self, n: int, watch: Watch) -> tuple[list[Group], ScoreStats]:
        """Groups of the next `n` prompts."""
        draws = range(self.draws, self.draws + n)
        self.draws += n
        prompts = [self.draw(d) for d in draws]
        seeds = [derive_seed(self.seed, d) for d in draws]
        return self.sampler.generate_and_score(prompts, seeds, self.group_size, self.sampling, watch)

    def _accuracy(self, tasks: Sequence[str]) -> list[str] | None:
        """The name of the accuracy reward of each of these tasks; None: the first reward."""
        return [self.accuracy_rewards[task] for task in tasks] if self.accuracy_rewards else None


def records_of(
    batch: RolloutBatch, rows: Sequence[Row], algorithm: Algorithm, weights: dict[str, float], step: int
) -> list[Record]:
    """One record for each completion that was sampled for a step: first those of the update, in order, then the rest.

    rows: of `batch.groups`, after the update. step: its number, from 1.
    """
    outcomes = [*((Status.TRAINED, group) for group in batch.groups), *batch.untrained]
    if not outcomes:
        return []
    scores_PG = torch.full((len(outcomes), len(outcomes[0][1].rollouts)), math.nan)
    if weights:
        scores_PG = algorithm.scores(rewards_of([group for _, group in outcomes], list(weights)), weights)
    records = [
        Record(rollout, number, status, step - (group.uid in batch.leftover_uids), score)
        for number, ((status, group), scores) in enumerate(zip(outcomes, scores_PG.tolist(), strict=True))
        for rollout, score in zip(group.rollouts, scores, strict=True)
    ]
    trained = [
        replace(record, status=status_of(row, algorithm), row=row) for record, row in zip(records, rows, strict=False)
    ]
    return [*trained, *records[len(rows) :]]


def status_of(row: Row, algorithm: Algorithm) -> Status:
    """The status of a row that is in an update."""
    if not any(row.mask):
        return Status.MASKED
    return Status.ZERO_ADVANTAGE if row.advantage == 0 and algorithm.zero_at_zero_advantage else Status.TRAINED
