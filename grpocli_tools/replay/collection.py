"""Collecting a recorded step again: its prompts drawn, its completions decoded, its groups selected."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.environments.environment import loaded_environment_of
from grpocli.errors import ConfigError, GrpoError
from grpocli.models.loading import configured_end_ids, end_token_ids, load_tokenizer
from grpocli.progress import UNWATCHED, Watch
from grpocli.rewards.scorer import Scorer, ScoreStats
from grpocli.rollout.engine import Engine, Listener, OnGroup, ignore_group
from grpocli.rollout.sampling import StopStrings, derive_seed
from grpocli.runs.rollouts import read_rollouts, read_schema
from grpocli.tasks.prompt_source import PromptSource, rewards_for
from grpocli.training.build_trainer import make_collector
from grpocli.training.checkpoint import checkpoints
from grpocli.training.collector import Collector, RolloutBatch, Sampler
from grpocli.types import Completion, Group, Prompt, Request, ReusableKV, Sampling, Status

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.rollout.engine import EngineJob

IN_UPDATE = (Status.TRAINED, Status.ZERO_ADVANTAGE, Status.MASKED)
"""Statuses of the rows that a step's update had."""
TOKEN_COLUMNS = ("loss_mask", "logprobs", "trainer_logprobs", "entropies", "ratios", "clipped")
"""Columns with one value for each token of `completion_ids`."""
REQUIRED = (
    *("step", "sampled_step", "status", "group", "uid", "prompt_ids", "completion_ids", "logprobs", "loss_mask"),
    *("finish_reason", "version"),
)
"""The columns that a replay cannot do without. None of their values is null."""
UNFINISHED = "unfinished"
"""The finish reason of recorded tokens that end without an end token, a stop string or the length limit."""

FileRow = dict[str, Any]


def commonest(values: Iterable[Any]) -> Any:
    """The most frequent value, the first of several."""
    (text, _), *_ = Counter(json.dumps(value, default=str) for value in values).most_common(1)
    return json.loads(text)


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """The rows of one group, by their place in the file: one damaged cell does not move a row to another group."""

    number: int
    rows: list[FileRow]

    def shared(self, column: str) -> Any:
        """The value of a column that all rows of the group share: the most frequent one."""
        return commonest(row.get(column) for row in self.rows)

    @property
    def uid(self) -> str:
        return str(self.shared("uid"))

    @property
    def in_update(self) -> bool:
        return bool(commonest(row["status"] in IN_UPDATE for row in self.rows))

    @property
    def status(self) -> Status:
        """Why the step did not train on the group; TRAINED if it did."""
        return Status.TRAINED if self.in_update else Status(self.shared("status"))

    @property
    def is_leftover(self) -> bool:
        """Whether it was sampled for the step before."""
        return bool(commonest(row["sampled_step"] < row["step"] for row in self.rows))

    def prompt(self) -> Prompt:
        """The prompt as the file has it."""
        columns = json.loads(self.shared("columns") or "{}")
        messages = columns.pop("prompt", None) or self.shared("messages")
        text = messages if messages is not None else self.shared("prompt")
        columns |= {"task_name": task} if (task := self.shared("task")) else {}
        return Prompt(self.uid, self.shared("prompt_ids"), text, columns, self.shared("row"))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step's record."""

    step: int
    groups: list[RecordedGroup]
    metrics: dict[str, Any] | None
    """Its line of metrics.jsonl; None if there is none (yet)."""

    @classmethod
    def read(cls, path: Path, step: int, group_size: int, metrics: dict[str, Any] | None) -> RecordedStep:
        """Read a rollout file. Raises ConfigError if its rows cannot be those of a step."""
        names = read_schema(path).names
        problems = [f": the column {column} is missing" for column in REQUIRED if column not in names]
        rows = [] if problems else read_rollouts(path)
        problems += [f", row {number}: {damage}" for number, row in enumerate(rows) if (damage := _damage(row))]
        if len(rows) % group_size:
            problems.append(f": {len(rows)} completions are not whole groups of {group_size} (rollout.group_size)")
        if problems:
            raise ConfigError(f"{path}: step {step}{problems[0]}; the file is damaged: name other steps")
        groups = [RecordedGroup(i, rows[i * group_size : (i + 1) * group_size]) for i in range(len(rows) // group_size)]
        return cls(step, groups, metrics)

    @property
    def rows(self) -> list[FileRow]:
        return [row for group in self.groups for row in group.rows]

    @property
    def trained(self) -> list[RecordedGroup]:
        return [group for group in self.groups if group.in_update]


def _damage(row: FileRow) -> str:
    """What is wrong with a row that no run has written; empty if nothing is."""
    if null := [column for column in REQUIRED if row[column] is None]:
        return f"the column {null[0]} is null"
    n = len(row["completion_ids"])
    wrong = [column for column in TOKEN_COLUMNS if row.get(column) is not None and len(row[column]) != n]
    return f"the column {wrong[0]} has {len(row[wrong[0]])} values for {n} completion_ids" if wrong else ""


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The recorded tokens of one completion, those of its environment included."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """The weight version of each token."""
    finish_reason: str


@dataclass(slots=True)
class RecordedEngine(Engine):
    """Returns the turns of recorded completions, as an engine that sampled them would.

    Turns end as in sampling: at an end token, a stop string or the limit. So the number of turns, their tokens and
    their finish reasons are computed again rather than read.
    """

    recorded: Mapping[str, Sequence[RecordedTokens]]
    """The completions of each prompt, by uid."""
    end_ids: frozenset[int]
    """Tokens that end a completion; empty: unknown, then a turn has all tokens and the recorded finish reason."""
    tokenizer: Any
    _episodes: dict[ReusableKV, tuple[RecordedTokens, int]] = field(default_factory=dict)
    """Completions and prompt lengths by the `ReusableKV` of their first turn, which later turns name."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """The next turn of each completion of each request."""
        listener = Listener.wrap(on_group)
        found = []
        for k, request in enumerate(requests):
            found.append(self._turns(request, request.under(sampling)))
            listener(k, found[k])
        return found

    def _turns(self, request: Request, sampling: Sampling) -> list[Completion]:
        assert request.prompt is not None
        if request.reusable_kv and request.reusable_kv[0] in self._episodes:
            one, prompt_length = self._episodes[request.reusable_kv[0]]
            return [self._turn(one, len(request.token_ids) - prompt_length, request, sampling)]
        everyone = self.recorded[request.prompt.uid]
        for kv, one in zip(request.reusable_kv, everyone, strict=False):
            self._episodes[kv] = one, len(request.token_ids)
        return [self._turn(one, 0, request, sampling) for one in everyone]

    def _turn(self, one: RecordedTokens, start: int, request: Request, sampling: Sampling) -> Completion:
        n, reason = self._end(one, start, request, sampling)
        piece = slice(start, start + n)
        versions = one.versions[piece] or one.versions[-1:]
        spans = [(version, len(list(tokens))) for version, tokens in groupby(versions)]
        changed = spans if len(spans) > 1 else None
        return Completion(one.token_ids[piece], one.logprobs[piece], reason, min(versions), spans=changed)

    def _end(self, one: RecordedTokens, start: int, request: Request, sampling: Sampling) -> tuple[int, str]:
        """The number of tokens of the turn that begins at `start`, and its finish reason."""
        ids = one.token_ids[start : start + sampling.max_tokens]
        if not self.end_ids:
            return len(ids), one.finish_reason
        watched = StopStrings(self.tokenizer, sampling.stop, request.token_ids) if sampling.stop else None
        for n, token in enumerate(ids, 1):
            if token in self.end_ids or (watched and watched.completed_by(token)):
                return n, "stop"
        return len(ids), "length" if len(ids) == sampling.max_tokens else UNFINISHED

    def sync(self, version: int) -> dict[str, float]:
        """Do nothing: there are no weights."""
        return {}

    def close(self) -> None:
        """Do nothing: there is no process to stop."""


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
    draw: Callable[[int], Prompt] | None
    """The prompt of a draw number; None without the data."""
    no_prompts: str
    """Why prompts are not drawn again."""
    end_ids: frozenset[int]
    """Tokens that end a completion; empty if unknown."""

    @property
    def weights(self) -> dict[str, float]:
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
            data.draw if data else None,
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
    collector = make_collector(source.run, sampler, sampler.draw, UNWATCHED)
    batch, problem = None, ""
    try:
        schedule = collector.schedule
        if schedule.max_staleness:  # of a stream, whose order of groups depends on a clock
            groups = sampler.groups([group.uid for group in recorded.groups])
            schedule.begin(recorded.step)
            schedule.running = {int(group.uid): recorded.step for group in groups}
            collector.end(groups, ScoreStats())
            batch = collector.take()
        else:
            schedule.step, collector.ended = recorded.step - 1, {int(group.uid): group for group in leftover}
            schedule.ready, schedule.draws = dict.fromkeys(collector.ended, schedule.step), draws
            batch = collector.collect(recorded.step)
    except GrpoError as error:
        problem = str(error)
    sampler.groups([group.uid for group in recorded.groups if group.uid not in sampler.found])
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
    if source.draw is None:
        return read, False
    drawn = {uid: source.draw(int(uid)) for uid in read if uid.isdigit()}
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

    With max_staleness 0 it is the number of the step that sampled it.
    """
    usual = recorded.step - group.is_leftover
    for row in group.rows:
        n, spans = len(row["completion_ids"]), row.get("version_spans")
        if spans:
            each = [version for version, tokens in spans for _ in range(tokens)]
            yield (each + each[-1:] * n)[:n]
        else:
            yield [row["version"] if run.rollout.max_staleness else usual] * n
