"""Generating and scoring: from prompts to the groups of rollouts that a step trains on."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpocli.algorithm.advantage import constant_P1, count_P1, std_P1
from grpocli.environments.tools import UNKNOWN
from grpocli.errors import RewardError
from grpocli.models.loading import end_token_ids
from grpocli.progress import UNWATCHED, Cancelled, Watch
from grpocli.rewards.scorer import ScoreStats, StreamingScorer
from grpocli.rollout.engine import Listener
from grpocli.rollout.multi_turn import MultiTurnEngine
from grpocli.rollout.sampling import derive_seed
from grpocli.runs.rollouts import Record
from grpocli.types import Completion, Group, Prompt, Request, Rollout, Row, Sampling, Status

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from grpocli.algorithm import Algorithm
    from grpocli.distributed.world import World
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.rewards.scorer import Scorer
    from grpocli.rollout.engine import Engine
    from grpocli.training.schedule import Schedule


def rewards_of(groups: Sequence[Group], names: Iterable[str]) -> dict[str, Tensor]:
    """{name: [P, G]}, NaN where a reward does not apply."""
    return {
        name: torch.tensor([[r.rewards[name] for r in g.rollouts] for g in groups], dtype=torch.float64)
        for name in names
    }


def lengths_of(groups: Sequence[Group], algorithm: Algorithm) -> Tensor:
    """The number of each completion's tokens in the loss [P, G]."""
    masked = algorithm.keep.mask_truncated
    return torch.tensor([[sum(r.completion.loss_mask(masked)) for r in g.rollouts] for g in groups])


@dataclass(slots=True)
class Sampler:
    """Generates, decodes and scores completions, spread over the processes. Two threads may use it at once."""

    world: World
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    """By task name."""
    scoring: threading.Lock = field(default_factory=threading.Lock)
    """Held while rewards run, which need not be thread-safe."""

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch = UNWATCHED
    ) -> tuple[list[Group], ScoreStats]:
        """One group of `n` scored rollouts for each prompt, in order and the same in every process. Collective.

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
        everyone = dict(self.world.gather_objects(list(zip(mine, groups, strict=True))))
        all_stats = self.world.gather_objects([stats])
        return [everyone[i] for i in range(len(prompts))], reduce(ScoreStats.add_process, all_stats)

    def score(
        self, arrived: Sequence[tuple[Prompt, Sequence[Completion]]], max_tokens: int
    ) -> list[tuple[Group, ScoreStats]]:
        """The scored groups of these completions, each with its counts. In this process alone."""
        groups = [
            [Rollout(prompt, done, self._text(done.token_ids)) for done in completions]
            for prompt, completions in arrived
        ]
        with self.scoring:
            scored = self.scorer.score_groups(groups, max_tokens)
        return [
            (Group(prompt, rollouts), stats) for (prompt, _), (rollouts, stats) in zip(arrived, scored, strict=True)
        ]

    @property
    def episodes(self) -> MultiTurnEngine:
        """The engine, for completions of several turns."""
        return MultiTurnEngine(self.engine.generate, self.tokenizer, self.environments, self.world.any)

    @property
    def episodes_here(self) -> MultiTurnEngine:
        """The same, for requests of this process alone."""
        return MultiTurnEngine(self.engine.sample, self.tokenizer, self.environments, bool)

    def _text(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class TargetSampler(Sampler):
    """Gives the targets of the data as completions, unscored, for supervised training; evaluations use a `Sampler`."""

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
    """The groups that one step trains on, with statistics of everything that was sampled for it."""

    groups: list[Group]
    metrics: dict[str, float]
    """Of this step alone; the trainer adds the earlier steps to `num_tokens`."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """See `Scorer.warnings`."""
    untrained: list[tuple[Status, Group]] = field(default_factory=list)
    """Groups that the step does not train on, with the reason, for the rollout file; in the main process only."""
    leftover_uids: frozenset[str] = frozenset()
    """Uids of the groups carried over from the previous step."""


def rollout_metrics(
    groups: Sequence[Group], rewards: Mapping[str, Tensor], scores_PG: Tensor | None
) -> dict[str, float]:
    """Means and deviations of `rewards` {name: [P, G]}, and lengths of completions in tokens that the model wrote."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    turns = [one.episode.turns for one in completions if one.episode]
    metrics = {"completions/clipped_ratio": float(np.mean([one.truncated for one in completions]))}
    if scores_PG is not None:
        metrics |= {
            "reward": scores_PG.nanmean().item(),
            "reward_std": std_P1(scores_PG).mean().item(),
            "frac_reward_zero_std": constant_P1(scores_PG).double().mean().item(),
        }
    if turns:
        metrics["completions/mean_turns"] = float(np.mean(turns))
    ended = [one for one in completions if not one.truncated]
    for kind, some in (("length", completions), ("terminated_length", ended)):
        if lengths := [one.written for one in some]:
            measured = {"mean": float(np.mean(lengths)), "min": float(min(lengths)), "max": float(max(lengths))}
            metrics |= {f"completions/{name}_{kind}": value for name, value in measured.items()}
    for name, values_PG in rewards.items():
        values_1N = values_PG.reshape(1, -1)
        metrics[f"rewards/{name}/mean"] = values_1N.nanmean().item()
        if count_P1(values_1N) > 1:
            metrics[f"rewards/{name}/std"] = std_P1(values_1N).item()
    return metrics


def task_metrics(
    groups: Sequence[Group], rewards: Mapping[str, Tensor], scores_PG: Tensor, accuracy_rewards: Mapping[str, str]
) -> dict[str, float]:
    """The mean score of each task, and the share of right completions by its accuracy reward; NaN without one."""
    metrics: dict[str, float] = {}
    for task, accuracy_reward in accuracy_rewards.items():
        own_P = torch.tensor([group.prompt.task == task for group in groups])
        accuracies = rewards[accuracy_reward][own_P]
        right = (accuracies >= 1).double().where(~accuracies.isnan(), math.nan)
        metrics[f"task/{task}/reward"] = scores_PG[own_P].nanmean().item()
        metrics[f"task/{task}/accuracy"] = right.nanmean().item()
    return metrics


def tool_use(groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, str]]:
    """The calls of tools and failed ones for each completion, and a sentence for each tool whose calls all failed."""
    everyone = [rollout.completion.episode for group in groups for rollout in group.rollouts]
    episodes = [episode for episode in everyone if episode and episode.calls is not None]
    if not episodes:
        return {}, {}
    calls: Counter[str] = sum((Counter(episode.calls) for episode in episodes), Counter())
    failures: Counter[str] = sum((Counter(episode.failures) for episode in episodes), Counter())
    counts = {"tools/calls": calls.total(), "tools/failures": failures.total()}
    for name in sorted(calls):
        counts |= {f"tools/{name}/calls": calls[name], f"tools/{name}/failures": failures[name]}
    failed = [one for episode in episodes for one in episode.messages if one["role"] == "tool" and "is_error" in one]
    first = {one.get("name", UNKNOWN): str(one["content"]).removeprefix("error: ") for one in reversed(failed)}
    warnings = {
        f"tool {name}": f"all {count} calls of {name} failed, the first with {first.get(name, 'no message')}; "
        "`grpocli rollouts RUN` shows them"
        for name, count in calls.items()
        if count > 1 and count == failures[name] and name != UNKNOWN
    }
    return {name: count / len(episodes) for name, count in counts.items()}, warnings


@dataclass(slots=True)
class SampledGroups:
    """What was sampled for one step."""

    all: list[Group] = field(default_factory=list)
    """In the order of their draws."""
    filtered: list[Group] = field(default_factory=list)
    """Those of them that the algorithm does not keep."""
    score_stats: ScoreStats = field(default_factory=ScoreStats)
    rounds: int | None = None
    """None in a stream."""


@dataclass(slots=True)
class Collector:
    """Draws prompts, has them sampled and scored, and keeps the groups that the algorithm wants."""

    sampler: Sampler
    algorithm: Algorithm
    draw: Callable[[int], Prompt]
    """The prompt of a draw number."""
    schedule: Schedule
    reward_weights: dict[str, float]
    group_size: int
    sampling: Sampling
    seed: int
    leftover: list[Group] = field(default_factory=list)
    """Groups that the last step kept but did not need; the next step trains on them first."""
    accuracy_rewards: Mapping[str, str] = field(default_factory=dict)
    """The name of each task's accuracy reward."""
    keeps_untrained: bool = True
    """Whether `RolloutBatch.untrained` is filled, with at most MAX_REFILL x `max_rounds` steps' worth of groups."""
    watch: Watch = UNWATCHED
    """Gets the progress of a step's sampling."""
    epoch_draws: int | None = None
    """The draws of an epoch, for the metric `epoch`; None: no such metric."""

    def collect(self, step: int) -> RolloutBatch:
        """Sample until the algorithm has kept `prompts_per_step` groups, or its rounds are used up. Collective.

        After an error `RolloutStream.state` is that before the step, and the run ends.
        """
        schedule, carried, sampled = self.schedule, self.leftover, SampledGroups()
        schedule.begin(step)
        while numbers := schedule.start():
            self._sample_round(sampled, numbers)
        sampled.rounds = schedule.rounds
        taken = schedule.take() or []
        found = {int(group.uid): group for group in (*carried, *sampled.all)}
        self.leftover = [found[number] for number in schedule.ready]
        batch = self.end_step([found[number] for number in taken], sampled, carried)
        unused = {*found} - {*taken, *schedule.ready, *(int(group.uid) for group in sampled.filtered)}
        untrained = [(Status.LEFTOVER, group) for group in self.leftover]
        untrained += [(Status.SURPLUS, found[number]) for number in sorted(unused)]
        return replace(batch, untrained=[*batch.untrained, *untrained] if self.keeps_untrained else [])

    def _sample_round(self, sampled: SampledGroups, numbers: Sequence[int]) -> None:
        """Sample and score the groups of a round."""
        schedule, watch, wanted = self.schedule, self.watch, self.schedule.prompts_per_step
        if schedule.rounds > 1:
            watch = watch.detailed(f"round {schedule.rounds}, {len(schedule.ready)} of {wanted} groups kept")
        prompts, seeds = [self.draw(n) for n in numbers], [derive_seed(self.seed, n) for n in numbers]
        groups, stats = self.sampler.generate_and_score(prompts, seeds, self.group_size, self.sampling, watch)
        sampled.score_stats = sampled.score_stats.add_round(stats)
        self.sampler.scorer.check_errors(sampled.score_stats, wanted * self.group_size)
        for number, group, keep in zip(numbers, groups, self.kept(groups), strict=True):
            schedule.end(number, schedule.step, keep)
            sampled.filtered += [] if keep else [group]
        sampled.all += groups

    def end_step(self, groups: list[Group], sampled: SampledGroups, carried: Sequence[Group] = ()) -> RolloutBatch:
        """The batch of a step that trains on `groups`. carried: those that were sampled for the step before."""
        wanted, keep = self.schedule.prompts_per_step, self.algorithm.keep
        if len(groups) < wanted and keep.on_exhausted == "error":
            raise RewardError(
                f"algorithm.keep.max_rounds={keep.max_rounds}: only {len(groups)} of {wanted} prompts had completions "
                "of different reward; raise it, or choose easier or harder prompts"
            )
        tools, tool_warnings = tool_use(sampled.all or groups)
        return RolloutBatch(
            groups,
            self._metrics(sampled, groups, len(carried)) | tools,
            {**self.sampler.scorer.warnings(sampled.score_stats), **tool_warnings},
            [(Status.FILTERED, group) for group in sampled.filtered] if self.keeps_untrained else [],
            frozenset(group.uid for group in carried),
        )

    def advantages(self, groups: Sequence[Group]) -> Tensor:
        """The advantages [P, G] of the groups that a step trains on."""
        if not groups or not self.reward_weights:
            unscored_PG = torch.zeros(len(groups), self.group_size, dtype=torch.float64)
            return self.algorithm.advantage(unscored_PG) if self.algorithm.supervised else unscored_PG
        lengths = lengths_of(groups, self.algorithm) if self.algorithm.needs_lengths else None
        rewards = rewards_of(groups, self.reward_weights)
        return self.algorithm.advantages(rewards, self.reward_weights, self._accuracy(groups), lengths)

    def _metrics(self, sampled: SampledGroups, wanted: Sequence[Group], n_leftover: int) -> dict[str, float]:
        n = len(sampled.all)
        written = sum(rollout.completion.written for group in sampled.all for rollout in group.rollouts)
        read = sum(len(group.prompt.token_ids) * len(group.rollouts) for group in sampled.all)
        metrics = {
            "sampling/kept": len(wanted),
            "sampling/carried": n_leftover,
            "sampling/acceptance": (n - len(sampled.filtered)) / n if n else 1.0,
            "tokens/generated": 0.0 if self.algorithm.supervised else float(written),
            "num_tokens": written + read,
        }
        metrics |= {} if sampled.rounds is None else {"sampling/rounds": sampled.rounds}
        groups = sampled.all or wanted  # a step may need no more than the leftover groups
        rewards = rewards_of(groups, self.reward_weights)
        scores_PG = self.algorithm.scores(rewards, self.reward_weights) if rewards else None
        metrics |= sampled.score_stats.metrics | rollout_metrics(groups, rewards, scores_PG)
        if scores_PG is not None and len(self.accuracy_rewards) > 1:
            metrics |= task_metrics(groups, rewards, scores_PG, self.accuracy_rewards)
            metrics |= {
                f"task/{task}/errors": float(sampled.score_stats.errors_of(task)) for task in self.accuracy_rewards
            }
        return metrics | ({"epoch": self.schedule.draws / self.epoch_draws} if self.epoch_draws else {})

    def kept(self, groups: Sequence[Group]) -> list[bool]:
        """Whether the algorithm keeps each group; all of them in a run without rewards."""
        if not self.reward_weights:
            return [True] * len(groups)
        rewards = rewards_of(groups, self.reward_weights)
        kept: list[bool] = self.algorithm.kept(rewards, self.reward_weights, self._accuracy(groups)).tolist()
        return kept

    def _accuracy(self, groups: Sequence[Group]) -> list[str] | None:
        """The name of the accuracy reward of each group's task; None: the first reward."""
        return [self.accuracy_rewards[group.prompt.task] for group in groups] if self.accuracy_rewards else None


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
        scores_PG = algorithm.scores(rewards_of([group for _, group in outcomes], weights), weights)
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
