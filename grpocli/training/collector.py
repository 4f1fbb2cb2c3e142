"""Generating and scoring: from prompts to the groups of rollouts that a step trains on."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


@dataclass(slots=True)
class Sampler:
    """Generates, decodes and scores completions, spread over the processes. Several threads may use it at once."""

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
            sampled = self.episodes().generate([prompts[i] for i in mine], requests, sampling, listener)
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
    ) -> tuple[list[Group], ScoreStats]:
        """The scored groups of these completions, and counts of errors. In this process alone; needs `scoring`."""
        rollouts = [Rollout(one, done, self._text(done.token_ids)) for one, whole in arrived for done in whole]
        scored, stats = self.scorer.score(rollouts, max_tokens)
        rest = iter(scored)
        return [Group(prompt, [next(rest) for _ in whole]) for prompt, whole in arrived], stats

    def episodes(self, here: bool = False) -> MultiTurnEngine:
        """The engine, for completions of several turns. here: for requests of this process alone."""
        complete, any_process = (self.engine.sample, bool) if here else (self.engine.generate, self.world.any)
        return MultiTurnEngine(complete, self.tokenizer, self.environments, any_process)

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


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


def staleness(groups: Sequence[Group], step: int, most: int) -> dict[str, float]:
    """The ages in weight versions of the tokens that a step trains on, and the share of each age up to `most`."""
    tokens = Counter(dict.fromkeys(range(most + 1), 0))
    for done in (rollout.completion for group in groups for rollout in group.rollouts):
        for version, count in done.spans or [(done.version, len(done.token_ids))]:
            tokens[step - version] += count
    mean = sum(age * count for age, count in tokens.items()) / max(1, tokens.total())
    shares = {f"staleness/{age}": count / max(1, tokens.total()) for age, count in sorted(tokens.items())}
    return {"staleness/mean": mean, "staleness/max": float(max(+tokens, default=0)), **shares}


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
    ended: dict[int, Group] = field(default_factory=dict)
    """Scored groups that no step has taken, by number. Between steps in rounds: the surplus to carry."""
    stats: ScoreStats = field(default_factory=ScoreStats)
    """Counts of what was scored since the last batch."""
    accuracy_rewards: Mapping[str, str] = field(default_factory=dict)
    """The name of each task's accuracy reward."""
    watch: Watch = UNWATCHED
    """Gets the progress of a step's sampling."""
    epoch_draws: int | None = None
    """The draws of an epoch, for the metric `epoch`; None: no such metric."""

    def collect(self, step: int) -> RolloutBatch:
        """Sample until the algorithm has kept `prompts_per_step` groups, or its rounds are used up. Collective."""
        schedule, carried = self.schedule, {*self.ended}
        schedule.begin(step)
        while numbers := schedule.start():
            watch = self.watch
            if schedule.rounds > 1:
                kept = f"{len(schedule.ready)} of {schedule.prompts_per_step} groups kept"
                watch = watch.detailed(f"round {schedule.rounds}, {kept}")
            prompts, seeds = [self.draw(n) for n in numbers], [derive_seed(self.seed, n) for n in numbers]
            self.end(*self.sampler.generate_and_score(prompts, seeds, self.group_size, self.sampling, watch))
        batch = self.take(carried)
        assert batch, "no group runs"
        return batch

    def end(self, groups: Sequence[Group], stats: ScoreStats) -> None:
        """Take in running groups that are scored. Raises RewardError if too many samples failed."""
        self.stats = self.stats.add_round(stats)
        self.sampler.scorer.check_errors(self.stats, self.schedule.prompts_per_step * self.group_size)
        for group, kept in zip(groups, self.kept(groups), strict=True):
            self.ended[int(group.uid)] = group
            self.schedule.end(int(group.uid), min(one.completion.version for one in group.rollouts), kept)

    def take(self, carried: Collection[int] = ()) -> RolloutBatch | None:
        """The batch of a step; None while it has to wait. carried: numbers of groups of the step before."""
        schedule, keep = self.schedule, self.algorithm.keep
        if (found := schedule.take()) is None:
            return None
        (taken, rejected), wanted = found, schedule.prompts_per_step
        if len(taken) < wanted and keep.on_exhausted == "error":
            raise RewardError(
                f"algorithm.keep.max_rounds={keep.max_rounds}: only {len(taken)} of {wanted} prompts had completions "
                "of different reward; raise it, or choose easier or harder prompts"
            )
        groups = [self.ended.pop(number) for number in taken]
        left = {*schedule.ready, *schedule.rejected}
        unused = {number: self.ended.pop(number) for number in sorted({*self.ended} - left)}
        leftover = {} if schedule.max_staleness else self.ended
        everyone = dict(zip(taken, groups, strict=True)) | unused | leftover
        sampled = [group for number, group in sorted(everyone.items()) if number not in carried]
        untrained = [(Status.FILTERED, unused.pop(number)) for number in sorted(rejected)]
        untrained += [(Status.LEFTOVER, group) for group in leftover.values()]
        untrained += [(Status.SURPLUS, group) for group in unused.values()]
        stats, self.stats = self.stats, ScoreStats()
        tools, tool_warnings = tool_use(sampled or groups)
        return RolloutBatch(
            groups,
            self._metrics(sampled, groups, stats, len({*rejected} - {*carried}), len(carried)) | tools,
            {**self.sampler.scorer.warnings(stats), **tool_warnings},
            untrained if self.sampler.world.is_main else [],
            frozenset(map(str, carried)),
        )

    def advantages(self, groups: Sequence[Group]) -> Tensor:
        """The advantages [P, G] of the groups that a step trains on."""
        if not groups or not self.reward_weights:
            unscored_PG = torch.zeros(len(groups), self.group_size, dtype=torch.float64)
            return self.algorithm.advantage(unscored_PG) if self.algorithm.supervised else unscored_PG
        lengths_PG = None
        if self.algorithm.needs_lengths:
            masked = self.algorithm.keep.mask_truncated
            lengths_PG = torch.tensor([[sum(r.completion.loss_mask(masked)) for r in g.rollouts] for g in groups])
        rewards = rewards_of(groups, self.reward_weights)
        return self.algorithm.advantages(rewards, self.reward_weights, self._accuracy(groups), lengths_PG)

    def _metrics(
        self, sampled: Sequence[Group], trained: Sequence[Group], stats: ScoreStats, n_rejected: int, n_carried: int
    ) -> dict[str, float]:
        n, schedule = len(sampled), self.schedule
        written = sum(rollout.completion.written for group in sampled for rollout in group.rollouts)
        read = sum(len(group.prompt.token_ids) * len(group.rollouts) for group in sampled)
        metrics = {
            "sampling/kept": len(trained),
            "sampling/carried": n_carried,
            "sampling/acceptance": (n - n_rejected) / n if n else 1.0,
            "tokens/generated": 0.0 if self.algorithm.supervised else float(written),
            "num_tokens": written + read,
        }
        if schedule.max_staleness:
            metrics |= staleness(trained, schedule.step, schedule.max_staleness)
        else:
            metrics["sampling/rounds"] = schedule.rounds
        groups = sampled or trained  # a step may need no more than the leftover groups
        rewards = rewards_of(groups, self.reward_weights)
        scores_PG = self.algorithm.scores(rewards, self.reward_weights) if rewards else None
        metrics |= self.sampler.scorer.metrics(stats, self.reward_weights.keys())
        metrics |= rollout_metrics(groups, rewards, scores_PG)
        if scores_PG is not None and len(self.accuracy_rewards) > 1:
            metrics |= task_metrics(groups, rewards, scores_PG, self.accuracy_rewards)
            metrics |= {f"task/{task}/errors": float(stats.errors_of(task)) for task in self.accuracy_rewards}
        return metrics | ({"epoch": schedule.draws / self.epoch_draws} if self.epoch_draws else {})

    def kept(self, groups: Sequence[Group]) -> list[bool]:
        """Whether the algorithm keeps each group; all of them in a run without rewards."""
        if not self.reward_weights or not groups:
            return [True] * len(groups)
        rewards = rewards_of(groups, self.reward_weights)
        return list(self.algorithm.kept(rewards, self.reward_weights, self._accuracy(groups)).tolist())

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
