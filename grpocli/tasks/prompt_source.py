"""The prompts that a run trains and evaluates on, in a reproducible order."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from grpocli.environments.environment import loaded_environment_of
from grpocli.errors import ConfigError
from grpocli.rewards.reward import Correctness
from grpocli.rewards.scorer import excerpt
from grpocli.tasks.order import Indices, TaskScheduler, difficulty_of, problem_order
from grpocli.tasks.prompts import PromptMaker, PromptSet, text_hash
from grpocli.tasks.table import Jsonl
from grpocli.tasks.task import columns_of, errors_below, key_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.tasks.task import Task
    from grpocli.types import Prompt

logger = logging.getLogger(__name__)
TRIES = 10_000
"""Consecutive rows of a stream that may be too long or held out, at most."""


class EpochPrompts:
    """Prompts of a task that is read whole, each once per epoch."""

    def __init__(self, prompts: PromptSet, task: object, *seed: int) -> None:
        self.prompts, self.report = prompts, prompts.report
        order, column = _order_keys(task)
        values = prompts.values(column.removeprefix("-")) if column else None
        difficulty = None if values is None else difficulty_of(values, str(column), prompts.where)
        self._epoch = lru_cache(maxsize=1)(lambda epoch: problem_order(len(prompts), order, difficulty, *seed, epoch))

    def draw(self, nth: int, uid: str) -> Prompt:
        """The nth prompt of this task."""
        epoch, place = divmod(nth, len(self.prompts))
        return self.prompts.prompt(int(self._epoch(epoch)[place]), uid)


class StreamedPrompts:
    """Prompts from shuffled blocks of `task.shuffle_buffer` rows.

    The row of a draw depends only on its number, the seed and the data. Another row of the block replaces one that is
    too long or held out, and so comes twice in that epoch. Leaving the row out would shift every later draw.
    """

    def __init__(self, task: Jsonl, maker: PromptMaker, *seed: int) -> None:
        self._stream, self._maker, self._block = task.stream, maker, task.shuffle_buffer
        self._seed, self._keys, self.report = seed, _order_keys(task), ""
        self._excluded = set(self._stream.excluded)
        self._length: int | None = None  # rows of an epoch; None before its end is reached
        self._warned = False
        self._rows_at = lru_cache(maxsize=2)(lambda start: self._stream.take(start, self._block))
        self._order = lru_cache(maxsize=2)(self._ordered)

    def exclude(self, hashes: Iterable[int]) -> None:
        """Exclude prompts with these hashes from training."""
        self._excluded.update(hashes)

    def draw(self, nth: int, uid: str) -> Prompt:
        """The nth prompt of this task. Raises ConfigError if a row is unusable, or if all are excluded."""
        for number in islice(self._candidates(nth), TRIES):
            if prompt := self._prompt(number, uid):
                return prompt
        problem, limit = f"{TRIES} rows of {self._maker.task} in a row are longer or held out", self._maker.max_tokens
        raise ConfigError(problem, key="rollout.max_prompt_tokens", value=limit, hint="raise it")

    def _where(self, number: int) -> str:
        return f"{self._maker.task} example ({self._stream.where(number)})"

    def _candidates(self, nth: int) -> Iterator[int]:
        """The number of the drawn row, then of its replacements: rows of its block, then of the next blocks."""
        while True:
            epoch, start, place = self._place(nth)
            order = self._order(epoch, start)
            rows = len(order)
            yield start + int(order[place])
            for i in range(rows):
                yield start + int(order[(place + rows // 2 + i) % rows])  # far from the draw of that row itself
            nth += rows - place

    def _place(self, nth: int) -> tuple[int, int, int]:
        """The epoch, the first row of the block, and the position in the block."""
        epoch, place = divmod(nth, self._length) if self._length else (0, nth)
        start, place = place - place % self._block, place % self._block
        if place < len(rows := self._rows_at(start)):
            return epoch, start, place
        self._length = start + len(rows) if rows else self._stream.count()
        return self._place(nth)

    def _ordered(self, epoch: int, start: int) -> Indices:
        rows, (order, column), difficulty = self._rows_at(start), self._keys, None
        if column:
            name = column.removeprefix("-")
            values = [self._stream.example(row, start + i).get(name) for i, row in enumerate(rows)]
            difficulty = difficulty_of(values, column, lambda i: self._where(start + i))
        return problem_order(len(rows), order, difficulty, *self._seed, epoch, start)

    def _prompt(self, number: int, uid: str) -> Prompt | None:
        start, maker = number - number % self._block, self._maker
        example = self._stream.example(self._rows_at(start)[number - start], number)
        if text_hash(example["prompt"]) in self._excluded:
            return None
        settled = maker.settled(example, self._where(number))
        if text_hash(settled[0]["prompt"]) in self._excluded:
            return None
        (ids,), target_ids = maker.token_ids([settled], lambda _: self._where(number))
        target, most = target_ids[0] if target_ids else None, maker.targets.max_tokens if maker.targets else 0
        if maker.drops and (len(ids) > maker.max_tokens or (target and len(target) > most)):
            if not self._warned:
                targets = f", and those with a target over {most}," if target else ""
                logger.warning("prompts of %s over %d tokens%s are replaced", maker.task, maker.max_tokens, targets)
            self._warned = True
            return None
        row = self._stream.first + number
        return maker.prompt(settled[0], ids[-maker.max_tokens :], target and target[:most], uid, row)


def _order_keys(task: object) -> tuple[str, str | None]:
    """`order` and `difficulty_column`, which a task of a user may lack."""
    return getattr(task, "order", "shuffled"), getattr(task, "difficulty_column", None)


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """The prompts of one task, with its columns, rewards and environment."""

    name: str
    key: str
    """Prefix of the task's config keys."""
    train: StreamedPrompts | EpochPrompts
    held_out: PromptSet | None
    wanted: int
    """Problems to evaluate on, where the task has so many."""
    columns: list[str]
    """Columns that rewards get."""
    rewards: list[str]
    """Names of the rewards that score its completions."""
    environment: EnvironmentConfig | None

    @classmethod
    def of(cls, task: Task, run: Run, maker: PromptMaker, alone: bool) -> TaskPrompts:
        """Load a task. alone: it is the run's only task."""
        name, label = maker.task, "" if alone else f"{maker.task} "
        seed = (run.seed,) if alone else (run.seed, zlib.crc32(name.encode()))
        examples = task.examples("train")
        train: StreamedPrompts | EpochPrompts
        if isinstance(task, Jsonl) and task.streaming:
            train = StreamedPrompts(task, maker, *seed)
        else:
            train = EpochPrompts(PromptSet(examples, maker, f"{label}train"), task, *seed)
        held_out = None
        # a started run has a number here
        wanted = run.eval.n_problems(cpu=False) if run.reward or maker.targets else 0
        if wanted:
            held_out = PromptSet(task.examples("eval"), maker, f"{label}eval", wanted, needs_targets=False)
        columns, rewards = columns_of(examples[0]), rewards_for(task, run.reward)
        environment = loaded_environment_of(task)
        return cls(name, key_of(run.task, name), train, held_out, wanted, columns, rewards, environment)

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task."""
        with errors_below(self.key):
            return self.train.draw(nth, uid)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompts of a run's tasks, and the scheduler that chooses between them."""

    tokenizer: PreTrainedTokenizerBase
    tasks: list[TaskPrompts]
    scheduler: TaskScheduler

    @classmethod
    def of(cls, run: Run, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int] = frozenset()) -> PromptSource:
        """Load all tasks. Raises ConfigError if one has no usable prompts, or trains on an evaluation prompt.

        end_ids: tokens that end a completion, beside the tokenizer's; supervised training teaches the one that the chat
        template writes.
        """
        chosen = run.tasks
        tasks: list[TaskPrompts] = []
        for name, task in chosen.items():
            with errors_below(key_of(run.task, name)):
                maker = PromptMaker.of(name, task, run, tokenizer, end_ids)
                tasks.append(TaskPrompts.of(task, run, maker, len(chosen) == 1))
        _refuse_overlap(tasks, chosen)
        for one in tasks:
            with errors_below(one.key):
                one.train.draw(0, "")  # fails early if streamed rows are unusable
        weights = [getattr(task, "weight", 1.0) for task in chosen.values()]
        return cls(tokenizer, tasks, TaskScheduler(weights, run.seed))

    def draw(self, number: int) -> Prompt:
        """The prompt of the run's draw number `number`."""
        turn, nth = self.scheduler.of(number) if len(self.tasks) > 1 else (0, number)
        return self.tasks[turn].draw(nth, uid=f"{number}")

    def problems(self) -> list[Prompt]:
        """The prompts to evaluate on, task by task."""
        found = [(task.held_out, i) for task in self.tasks if task.held_out for i in range(len(task.held_out))]
        return [held_out.prompt(i, uid=f"eval-{place}") for place, (held_out, i) in enumerate(found)]

    @property
    def epoch(self) -> int | None:
        """The number of draws in which every training example is drawn once; None if it is not known.

        With several tasks: of the one that takes longest.
        """
        if any(isinstance(task.train, StreamedPrompts) for task in self.tasks):
            return None
        shares = np.array(self.scheduler.weights) / sum(self.scheduler.weights)
        sizes = [len(task.train.prompts) for task in self.tasks if isinstance(task.train, EpochPrompts)]
        return max(int(np.ceil(size / share)) for size, share in zip(sizes, shares, strict=True))

    @property
    def rewards(self) -> dict[str, list[str]]:
        """The names of the rewards that score each task."""
        return {task.name: task.rewards for task in self.tasks}

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """The environments of the tasks that have one."""
        return {task.name: task.environment for task in self.tasks if task.environment}

    @property
    def reports(self) -> list[str]:
        """Sentences about excluded prompts, and about tasks with few problems to evaluate on."""
        sets = [part for task in self.tasks for part in (task.train, task.held_out) if part]
        few = [task for task in self.tasks if task.held_out and len(task.held_out) < task.wanted]
        return [part.report for part in sets if part.report] + [
            f"problems of {task.name} to evaluate on: {len(task.held_out or ()):,}, fewer than "
            f"eval.problems={task.wanted:,}"
            for task in few
        ]


def rewards_for(task: object, rewards: Mapping[str, object]) -> list[str]:
    """The names of the run's rewards that score a task's completions."""
    wanted: Sequence[str] | None = getattr(task, "rewards", None)
    return list(rewards if wanted is None else wanted)


def accuracy_reward_of(task: object, rewards: Mapping[str, object], preferred: str | None) -> str:
    """The accuracy reward of a task: `preferred` (`eval.reward`) if it scores the task, else its first reward."""
    names = rewards_for(task, rewards)
    return preferred if preferred in names else names[0]


def accuracy_rewards_of(run: Run) -> dict[str, str]:
    """`accuracy_reward_of` each task of a run; empty without rewards."""
    if not run.reward:
        return {}
    return {name: accuracy_reward_of(task, run.reward, run.eval.reward) for name, task in run.tasks.items()}


def doubtful_choices(run: Run) -> dict[str, str]:
    """A warning where the first reward measures accuracy, but only a later one decides whether answers are right."""
    found = {}
    for name, first in accuracy_rewards_of(run).items():
        names = rewards_for(run.tasks[name], run.reward)
        deciding = [one for one in names if isinstance(run.reward[one], Correctness)]
        if deciding and first not in [*deciding, run.eval.reward]:
            found[first] = (
                f"accuracy is the share of completions that reward.{first}, the first, scores 1 or more; "
                f"eval.reward={deciding[0]} measures how many answers are right"
            )
    return found


def _refuse_overlap(tasks: Sequence[TaskPrompts], chosen: Mapping[str, Task]) -> None:
    """Raise ConfigError for prompts that are trained and evaluated on; streamed tasks skip such prompts."""
    for evaluated in tasks:
        if not evaluated.held_out or getattr(chosen[evaluated.name], "allow_overlap", False):
            continue
        for trained in tasks:
            if isinstance(trained.train, StreamedPrompts):
                trained.train.exclude(evaluated.held_out.hashes)
            elif isinstance(trained.train, EpochPrompts) and (
                shared := evaluated.held_out.shared_with(trained.train.prompts)
            ):
                first = excerpt(str(evaluated.held_out.prompt(shared[0], "").text))
                problem = f"{len(shared)} of the {len(evaluated.held_out)} evaluation problems of {evaluated.name} are"
                hint = f"evaluate on other data, or set {evaluated.key}.allow_overlap=true"
                raise ConfigError(
                    f"{problem} also training problems of {trained.name}; the first is {first}",
                    key=evaluated.key,
                    hint=hint,
                )
