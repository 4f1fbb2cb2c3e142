"""Collecting a recorded step again: its prompts drawn, its completions decoded, its groups selected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.environments.environment import loaded_environment_of
from grpocli.errors import ConfigError, GrpoError
from grpocli.models.loading import configured_end_ids, end_token_ids, load_tokenizer
from grpocli.progress import UNWATCHED, Watch
from grpocli.rewards.scorer import Scorer, ScoreStats
from grpocli.rollout.sampling import derive_seed
from grpocli.tasks.prompt_source import PromptSource, rewards_for
from grpocli.training.build_trainer import make_collector
from grpocli.training.checkpointer import checkpoints
from grpocli.training.collector import Collector, RolloutBatch, Sampler
from grpocli.training.prefetch import without_stale
from grpocli.training.saved_rollouts import Redraw
from grpocli.types import Group, Prompt, Sampling
from grpocli_tools.replay.record import RecordedEngine, RecordedGroup, RecordedStep, RecordedTokens, commonest

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.rollout.engine import EngineJob

FEW = 0.1
"""Share of values up to which disagreeing ones count as damage of the record; above it the source has changed."""


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """Consecutive steps that one config has trained."""

    first: int
    last: int
    run: Run
    job: EngineJob
    """How its model is loaded."""
    no_model: str = ""
    """Why the initial model is not available; empty if it is."""


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """What a replay computes rollouts from."""

    run: Run
    world: World
    tokenizer: Any
    scorer: Scorer
    """With the rewards that are called again."""
    skipped: Mapping[str, str]
    """{reward: why it is not called again}."""
    environments: Mapping[str, EnvironmentConfig]
    redraw: Redraw | None
    """The prompt of a draw, by its number and its row; None without the data."""
    no_prompts: str
    """Why prompts are not drawn again."""
    end_ids: frozenset[int]
    """Tokens that end a completion; empty if unknown."""

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward."""
        return {name: reward.weight for name, reward in self.run.reward.items()}

    @classmethod
    def of(cls, session: ReplaySession, world: World, run_dir: Path) -> RolloutSource:
        """The source of a session. Raises ConfigError if there is no tokenizer."""
        run, tasks = session.run, session.run.tasks
        tokenizer, folder = _tokenizer(session, run_dir)
        data, no_prompts = None, ""
        try:
            data = PromptSource.of(run, tokenizer)
        except (GrpoError, OSError) as error:
            no_prompts = f"the data cannot be read again ({error})"
        columns = {name: task.columns for task in data.tasks for name in task.rewards} if data else {}
        skipped = {name: why for name in run.reward if (why := _why_skipped(run, name, columns.get(name)))}
        called = {name: reward for name, reward in run.reward.items() if name not in skipped}
        of_tasks = data.rewards if data else {name: rewards_for(task, run.reward) for name, task in tasks.items()}
        environments = {name: found for name, task in tasks.items() if (found := loaded_environment_of(task))}
        ours = type(run.engine.resolved()).__module__.startswith("grpocli.")
        return cls(
            run,
            world,
            tokenizer,
            Scorer(called, run.rollout.max_reward_errors, of_tasks),
            skipped,
            environments,
            data.redraw if data else None,
            no_prompts,
            end_token_ids(configured_end_ids(run.model, folder), tokenizer) if ours or environments else frozenset(),
        )

    def scores(self, name: str, groups: Sequence[Group]) -> list[float]:
        """The scores of one reward, for each completion in order. One that sees the group gets the others' scores."""
        scorer = replace(self.scorer, rewards={name: self.scorer.rewards[name]})
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        known = [other for other, reward in self.run.reward.items() if other != name and not reward.sees_group]
        scored, _ = scorer.score(rollouts, self.run.rollout.sampling.max_tokens, known=known)
        return [rollout.rewards[name] for rollout in scored]


def _tokenizer(session: ReplaySession, run_dir: Path) -> tuple[Any, str]:
    """The tokenizer, from the initial model, a checkpoint or the final model, and that folder."""
    saved = [path for path in [*reversed(checkpoints(run_dir / "checkpoints")), run_dir / "model"] if path.is_dir()]
    folders = [*([] if session.no_model else [session.job.model_path]), *map(str, saved)]
    if not folders:
        raise ConfigError(f"there is no tokenizer: {session.no_model}", key="RUN", value=run_dir)
    return load_tokenizer(session.run.model, folders[0]), folders[0]


def _why_skipped(run: Run, name: str, columns: Sequence[str] | None) -> str:
    """Why a reward is not called again; empty if it is. columns: of the task that it scores, if known."""
    reward = run.reward[name]
    if not getattr(reward, "repeatable", True):
        return "it asks a service"
    try:
        if check_ready := getattr(reward, "check_ready", None):
            check_ready()
        if columns is not None:
            reward.check(columns)
    except (GrpoError, OSError) as error:
        return f"it cannot be called ({error})"
    return ""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step collected again."""

    groups: list[Group]
    """With the recorded rewards, in the order of the file."""
    drawn: bool
    """Whether their prompts are drawn again rather than read."""
    collector: Collector
    batch: RolloutBatch | None
    """The selection by the recorded rewards, with its metrics; None if it cannot be repeated."""
    problem: str = ""
    """Why it cannot be repeated."""


def collect_again(source: RolloutSource, recorded: RecordedStep) -> CollectedStep:
    """Collect a step again from its record."""
    torch.manual_seed(derive_seed(source.run.seed, 2**32 - 2, recorded.step - 1, 0))  # as `Trainer.begin_step`
    prompts, drawn = _prompts(source, recorded)
    sampler = _RecordedSampler(source, recorded, prompts)
    leftover = sampler.groups([group.uid for group in recorded.groups if group.is_leftover])
    draws = min((int(g.uid) for g in recorded.groups if not g.is_leftover and g.uid.isdigit()), default=0)
    collector = make_collector(source.run, sampler, sampler.draw, draws, leftover, UNWATCHED)
    batch, problem = None, ""
    try:
        batch = collector.collect()
    except GrpoError as error:
        problem = str(error)
    sampler.groups([group.uid for group in recorded.groups if group.uid not in sampler.found])
    if batch and source.run.rollout.max_staleness:
        batch = without_stale(batch, recorded.step, source.run.rollout.max_staleness)
    return CollectedStep([sampler.found[group.uid] for group in recorded.groups], drawn, collector, batch, problem)


def recorded_rewards(recorded: RecordedStep, names: Sequence[str]) -> dict[str, Tensor]:
    """{name: [P, G]}, NaN where the record has no number."""

    def number(value: Any) -> float:
        return float(value) if isinstance(value, int | float) else math.nan

    rows_PG = [group.rows for group in recorded.groups]
    values = {name: [[number(row.get(f"reward/{name}")) for row in rows] for rows in rows_PG] for name in names}
    return {name: torch.tensor(of_reward, dtype=torch.float64) for name, of_reward in values.items()}


def _prompts(source: RolloutSource, recorded: RecordedStep) -> tuple[dict[str, Prompt], bool]:
    """The prompt of each uid, and whether they are drawn again.

    If most prompts differ from the record, the data has changed: then the recorded ones are used.
    """
    read = {group.uid: group.prompt() for group in recorded.groups}
    if source.redraw is None:
        return read, False
    found = {uid: source.redraw(int(uid), prompt.row) for uid, prompt in read.items() if uid.isdigit()}
    drawn = {uid: prompt for uid, prompt in found.items() if prompt}
    other = [uid for uid in read if uid not in drawn or drawn[uid].token_ids != read[uid].token_ids]
    return (read, False) if len(other) > FEW * len(read) else (read | drawn, True)


class _RecordedSampler(Sampler):
    """Decodes recorded completions, and gives them the recorded rewards, by which groups are selected."""

    __slots__ = ("found", "place", "prompts", "recorded", "rewards", "source")

    def __init__(self, source: RolloutSource, recorded: RecordedStep, prompts: dict[str, Prompt]) -> None:
        self.source, self.recorded, self.prompts = source, recorded, prompts
        self.rewards = recorded_rewards(recorded, list(source.run.reward))
        self.place = {group.uid: p for p, group in enumerate(recorded.groups)}
        self.found: dict[str, Group] = {}
        tokens = {group.uid: tokens_of(group, recorded, source.run) for group in recorded.groups}
        engine = RecordedEngine(tokens, source.end_ids, source.tokenizer)
        scorer = replace(source.scorer, rewards={})
        super().__init__(source.world, engine, source.tokenizer, scorer, source.environments)

    def draw(self, number: int) -> Prompt:
        """The prompt of a draw. Raises GrpoError if the record lacks it."""
        if str(number) not in self.prompts:
            raise GrpoError(f"by the recorded rewards the step needs draw {number} too, which the file does not have")
        return self.prompts[str(number)]

    def groups(self, uids: Sequence[str]) -> list[Group]:
        """The groups of these prompts."""
        run, prompts = self.source.run, [self.prompts[uid] for uid in uids]
        return self.generate_and_score(prompts, [0] * len(uids), run.rollout.group_size, run.rollout.sampling)[0]

    def generate_and_score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int, sampling: Sampling, watch: Watch = UNWATCHED
    ) -> tuple[list[Group], ScoreStats]:
        """As `Sampler.generate_and_score`, for recorded completions."""
        if not prompts:
            return [], ScoreStats()
        groups, stats = super().generate_and_score(prompts, seeds, n, sampling)
        for group in groups:
            p = self.place[group.uid]
            scores = [{name: float(values[p, g]) for name, values in self.rewards.items()} for g in range(n)]
            rollouts = [replace(r, rewards=one) for r, one in zip(group.rollouts, scores, strict=True)]
            self.found[group.uid] = Group(group.prompt, rollouts)
        return [self.found[prompt.uid] for prompt in prompts], stats


def tokens_of(group: RecordedGroup, recorded: RecordedStep, run: Run) -> list[RecordedTokens]:
    """The recorded tokens of a group's completions."""
    return [
        RecordedTokens(row["completion_ids"], row["logprobs"], versions, row["finish_reason"])
        for row, versions in zip(group.rows, _versions(group, recorded, run), strict=True)
    ]


def _versions(group: RecordedGroup, recorded: RecordedStep, run: Run) -> Iterator[list[int]]:
    """The weight version of each token of each completion.

    Unless weights change under running requests, all completions that a step samples have the same version; without
    prefetch it is the step's number.
    """
    alike = [other for other in recorded.groups if other.is_leftover == group.is_leftover]
    usual = recorded.step - group.is_leftover
    if run.rollout.max_staleness:
        usual = commonest(one["version"] for other in alike for one in other.rows)
    for row in group.rows:
        n, spans = len(row["completion_ids"]), row.get("version_spans")
        if spans:
            each = [version for version, tokens in spans for _ in range(tokens)]
            yield (each + each[-1:] * n)[:n]
        else:
            yield [row["version"] if run.rollout.in_flight else usual] * n
