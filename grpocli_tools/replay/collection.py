"""Collecting a recorded step again: its prompts drawn, its completions decoded and scored, its groups selected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import GrpoError
from grpocli.progress import UNWATCHED, Watch
from grpocli.rewards.scorer import ScoreStats
from grpocli.rollout.sampling import derive_seed
from grpocli.training.build_trainer import make_collector
from grpocli.training.collector import RolloutBatch, Sampler
from grpocli.training.prefetch import without_stale
from grpocli.training.saved_rollouts import Redraw
from grpocli.types import Group, Prompt, Sampling
from grpocli_tools.replay.record import FileRow, RecordedGroup, RecordedStep, commonest
from grpocli_tools.replay.recorded_engine import RecordedEngine, RecordedTokens

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.rewards.scorer import Scorer

FEW = 0.1
"""Share of values up to which disagreeing ones count as damage of the record; above it the source has changed."""


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """What a replay computes rollouts from.

    run: the config of the step. redraw: the prompt of a draw, by its number and its row; None without the data. scorer:
    with the rewards that are called again. end_ids: tokens that end a completion; empty if unknown.
    """

    run: Run
    world: World
    tokenizer: Any
    scorer: Scorer
    environments: Mapping[str, EnvironmentConfig]
    redraw: Redraw | None
    end_ids: frozenset[int]

    @property
    def for_samples(self) -> Scorer:
        """The scorer of completions without scores; rewards that see the group need the scores of all others."""
        rewards = self.scorer.rewards
        if len(rewards) < len(self.run.reward):
            rewards = {name: reward for name, reward in rewards.items() if not reward.sees_group}
        return replace(self.scorer, rewards=rewards)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward."""
        return {name: reward.weight for name, reward in self.run.reward.items()}


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step collected again.

    groups: in the order of the file, with the rewards computed again, and the recorded values of those that were not.
    recorded_rewards: {name: [P, G]}. drawn: the prompts of `groups` are drawn again rather than read. batch: the
    selection by the recorded rewards, with its metrics; None if it cannot be repeated, for the reason `problem`.
    """

    groups: list[Group]
    recorded_rewards: dict[str, Tensor]
    drawn: bool
    batch: RolloutBatch | None
    problem: str = ""

    def with_recorded(self, names: Sequence[str]) -> CollectedStep:
        """The step, with the recorded values of these rewards instead of those computed again."""
        groups = [
            Group(group.prompt, [replace(r, rewards=r.rewards | one.rewards) for r, one in zip(*pair, strict=True)])
            for group, recorded in zip(self.groups, self.with_recorded_rewards(names), strict=True)
            for pair in [(group.rollouts, recorded.rollouts)]
        ]
        return replace(self, groups=groups)

    def with_scores(self, name: str, scores: Sequence[float]) -> CollectedStep:
        """The step, with these scores of one reward, for each completion in order."""
        each = iter(scores)
        groups = [
            Group(group.prompt, [replace(r, rewards=r.rewards | {name: next(each)}) for r in group.rollouts])
            for group in self.groups
        ]
        return replace(self, groups=groups)

    def scored_again(self, source: RolloutSource, name: str) -> list[float]:
        """The scores of one reward in another call, for each completion in order.

        A reward that sees the group gets the other scores of these groups.
        """
        scorer = replace(source.scorer, rewards={name: source.scorer.rewards[name]})
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        known = [other for other, reward in source.run.reward.items() if other != name and not reward.sees_group]
        scored, _ = scorer.score(rollouts, source.run.rollout.sampling.max_tokens, known=known)
        return [rollout.rewards[name] for rollout in scored]

    def with_recorded_rewards(self, names: Sequence[str]) -> list[Group]:
        """The groups, with the recorded rewards."""
        return [_with_rewards(group, self.recorded_rewards, names, p) for p, group in enumerate(self.groups)]


def collect_again(source: RolloutSource, recorded: RecordedStep, draws: int) -> CollectedStep:
    """Collect a step again from its record. draws: prompts drawn before the step."""
    torch.manual_seed(derive_seed(source.run.seed, 2**32 - 2, recorded.step - 1, 0))  # as `Trainer.begin_step`
    prompts, drawn = _prompts(source, recorded)
    rewards = recorded_rewards(recorded, list(source.run.reward))
    sampler = _RecordedSampler(source, recorded, prompts, rewards)
    leftover = [group for group in recorded.groups if group.is_leftover]
    kept_before = sampler.groups([group.uid for group in leftover])
    collector = make_collector(source.run, sampler, sampler.draw, draws, kept_before, UNWATCHED)  # type: ignore[arg-type]
    batch, problem = None, ""
    try:
        batch = collector.collect()
    except (_OtherSelectionError, GrpoError) as error:
        problem = str(error)
    sampler.groups([group.uid for group in recorded.groups if group.uid not in sampler.found])
    if batch and source.run.rollout.max_staleness:
        batch = without_stale(batch, recorded.step, source.run.rollout.max_staleness)
    groups = [sampler.found[group.uid] for group in recorded.groups]
    return CollectedStep(groups, rewards, drawn, batch, problem)


def recorded_rewards(recorded: RecordedStep, names: Sequence[str]) -> dict[str, Tensor]:
    """{name: [P, G]}, NaN where the record has no number."""
    return {
        name: torch.tensor(
            [[_number(row.get(f"reward/{name}")) for row in group.rows] for group in recorded.groups],
            dtype=torch.float64,
        )
        for name in names
    }


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _prompts(source: RolloutSource, recorded: RecordedStep) -> tuple[dict[str, Prompt], bool]:
    """The prompt of each uid, and whether they are drawn again.

    If most prompts differ from the record, the data has changed: then the recorded ones are used.
    """
    read = {group.uid: group.prompt() for group in recorded.groups}
    if source.redraw is None:
        return read, False
    numbered = {uid: prompt for uid, prompt in read.items() if uid.isdigit()}
    found = {uid: source.redraw(int(uid), prompt.row) for uid, prompt in numbered.items()}
    drawn = {uid: prompt for uid, prompt in found.items() if prompt}
    other = [uid for uid in read if uid not in drawn or drawn[uid].token_ids != read[uid].token_ids]
    return (read, False) if len(other) > FEW * len(read) else (read | drawn, True)


class _OtherSelectionError(Exception):
    """The recorded rewards select other groups than the record has."""


@dataclass(slots=True)
class _RecordedSampler:
    """Stands in for the `Sampler` of a step: decodes and scores recorded completions, and returns them with the
    recorded rewards, by which the step selected its groups. found: by uid, with the rewards computed again.
    """

    source: RolloutSource
    recorded: RecordedStep
    prompts: dict[str, Prompt]
    rewards: dict[str, Tensor]
    found: dict[str, Group] = field(default_factory=dict)
    scorer: Any = field(default_factory=lambda: SimpleNamespace(check_errors=lambda *_: None, warnings=lambda _: {}))

    @property
    def world(self) -> World:
        return self.source.world

    def draw(self, number: int) -> Prompt:
        """The prompt of a draw. Raises _OtherSelectionError if the record lacks it."""
        if str(number) not in self.prompts:
            problem = f"by the recorded rewards the step needs draw {number} too, which the file does not have"
            raise _OtherSelectionError(problem)
        return self.prompts[str(number)]

    def groups(self, uids: Sequence[str]) -> list[Group]:
        """The groups of these prompts, with the recorded rewards."""
        prompts = [self.prompts[uid] for uid in uids]
        if not prompts:
            return []
        run = self.source.run
        groups, _ = self.generate_and_score(prompts, [0] * len(prompts), run.rollout.group_size, run.rollout.sampling)
        return groups

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch = UNWATCHED
    ) -> tuple[list[Group], ScoreStats]:
        """As `Sampler.generate_and_score`, for recorded completions."""
        source, by_uid = self.source, {group.uid: group for group in self.recorded.groups}
        tokens = {prompt.uid: tokens_of(by_uid[prompt.uid], self.recorded, source.run) for prompt in prompts}
        engine = RecordedEngine(tokens, source.end_ids, source.tokenizer)
        sampler = Sampler(source.world, engine, source.tokenizer, source.for_samples, source.environments)
        groups, stats = sampler.generate_and_score(prompts, seeds, n, sampling)
        names = list(self.rewards)
        place = {group.uid: p for p, group in enumerate(self.recorded.groups)}
        old = [_with_rewards(group, self.rewards, names, place[group.uid]) for group in groups]
        for new, recorded in zip(groups, old, strict=True):
            pairs = zip(new.rollouts, recorded.rollouts, strict=True)
            # the rewards computed again, and the recorded values of those that were not
            again = [replace(one, rewards=before.rewards | one.rewards) for one, before in pairs]
            self.found[new.uid] = Group(new.prompt, again)
        return old, stats


def _with_rewards(group: Group, rewards: Mapping[str, Tensor], names: Sequence[str], p: int) -> Group:
    scores = [{name: float(rewards[name][p, g]) for name in names} for g in range(len(group.rollouts))]
    return Group(group.prompt, [replace(r, rewards=one) for r, one in zip(group.rollouts, scores, strict=True)])


def tokens_of(group: RecordedGroup, recorded: RecordedStep, run: Run) -> list[RecordedTokens]:
    """The recorded tokens of a group's completions."""
    return [
        RecordedTokens(
            row["completion_ids"],
            row["logprobs"],
            _versions(row, group, recorded, run),
            row["finish_reason"],
            written_by_model(row),
        )
        for row in group.rows
    ]


def written_by_model(row: FileRow) -> list[int]:
    """1 for the model's tokens of a completion, 0 for its environment's."""
    n, gaps = len(row["completion_ids"]), (row.get("turns") or 1) - 1
    if gaps < 1 or any(row["loss_mask"]):
        return list(row["loss_mask"]) if gaps > 0 else [1] * n
    # Rows outside of the update have no mask. Environments' tokens have log-prob 0, and so may some of the model's.
    runs, start = [], 0
    for is_zero, values in groupby(row["logprobs"], lambda value: value == 0):
        end = start + len(list(values))
        if is_zero and start > 0 and end < n:
            runs.append(range(start, end))
        start = end
    outside = {t for run in sorted(runs, key=len, reverse=True)[:gaps] for t in run}
    return [int(t not in outside) for t in range(n)]


def _versions(row: FileRow, group: RecordedGroup, recorded: RecordedStep, run: Run) -> list[int]:
    """The weight version of each token.

    Unless weights change under running requests, all completions that a step samples have the same version; without
    prefetch it is the step's number.
    """
    n = len(row["completion_ids"])
    if row.get("version_spans"):
        spans = [version for version, tokens in row["version_spans"] for _ in range(tokens)]
        return (spans + spans[-1:] * n)[:n]
    if run.rollout.in_flight:
        return [row["version"]] * n
    if not run.rollout.max_staleness:
        return [recorded.step - group.is_leftover] * n
    alike = [other for other in recorded.groups if other.is_leftover == group.is_leftover]
    return [commonest(one["version"] for other in alike for one in other.rows)] * n
