"""The prompts that a run trains and evaluates on, in a reproducible order."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from grpocli.environments.environment import loaded_environment_of
from grpocli.environments.tools import tools_of
from grpocli.errors import ConfigError
from grpocli.rewards.reward import Correctness
from grpocli.rewards.scorer import excerpt
from grpocli.tasks.curriculum import (
    Curriculum,
    Order,
    OrderKeys,
    Position,
    ProblemOrder,
    ProblemScores,
    Rows,
    TaskScheduler,
)
from grpocli.tasks.jsonl import Jsonl
from grpocli.tasks.prompt_set import PromptSet, Targets
from grpocli.tasks.streaming import StreamedPrompts
from grpocli.tasks.task import columns_of, errors_below, key_of, tasks_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.tasks.task import Task
    from grpocli.types import Prompt


class EpochPrompts:
    """Prompts of a task that is read whole, each once per epoch: the only block of its data."""

    def __init__(self, prompts: PromptSet, seed: Sequence[int], order: str = "shuffled") -> None:
        self.prompts, self._shuffled = prompts, Order(len(prompts), *seed)
        self._in_file_order = order == "file"
        self._rows = np.array(prompts.rows, np.int64)
        self._values = cache(prompts.values)

    @property
    def report(self) -> str:
        return self.prompts.report

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task."""
        index = nth % len(self.prompts) if self._in_file_order else self._shuffled.index(nth)
        return self.prompts.prompt(index, uid)

    @property
    def block(self) -> int:
        """One more than the largest row."""
        return int(self._rows[-1]) + 1

    def rows(self, epoch: int, start: int, shuffled: bool) -> Rows:
        """All rows in their order in an epoch; none after them."""
        if start:
            return self._rows[:0]
        return self._rows[self._shuffled.epoch(epoch)] if shuffled else self._rows

    def problem(self, row: int, uid: str) -> Prompt | None:
        """The prompt of a row; None if the task has no such prompt."""
        index = int(np.searchsorted(self._rows, row))
        return self.prompts.prompt(index, uid) if index < len(self._rows) and self._rows[index] == row else None

    def values(self, start: int, column: str) -> Mapping[int, tuple[Any, str]]:
        """{row: (its value in a column, the name of the row in errors)}."""
        return self._values(column)

    def position(self, nth: int) -> Position:
        """The position of the shuffled order before its nth draw."""
        epoch, place = divmod(nth, len(self._rows))
        return Position(epoch, taken=self.rows(epoch, 0, True)[:place])

    def unusable(self) -> ConfigError:
        """Not raised: a prompt set has only usable prompts, and at least one."""
        return ConfigError("no prompt is usable", key="task")


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
    order: ProblemOrder | None = None
    """None if the problem of a draw follows from the draw's number."""

    @classmethod
    def of(
        cls,
        name: str,
        task: Task,
        run: Run,
        tokenizer: PreTrainedTokenizerBase,
        alone: bool,
        targets: Targets | None = None,
    ) -> Self:
        """Load a task. alone: it is the run's only task. targets: of supervised training."""
        limits = run.rollout.max_prompt_tokens, run.rollout.long_prompts
        label = "" if alone else f"{name} "
        seed = (run.seed,) if alone else (run.seed, zlib.crc32(name.encode()))
        examples = task.examples("train")
        keys = OrderKeys.of(task)
        environment = loaded_environment_of(task)
        tools, last_turn = tools_of(environment), getattr(task, "last_turn", None)
        train: StreamedPrompts | EpochPrompts
        if streaming := isinstance(task, Jsonl) and task.streaming:
            buffer, shuffled = task.shuffle_buffer, keys.order != "file"
            train = StreamedPrompts(
                task.stream, tokenizer, *limits, name, buffer, seed, shuffled, targets, tools, last_turn
            )
        else:
            prompts = PromptSet(examples, tokenizer, *limits, f"{label}train", name, None, targets, tools, last_turn)
            train = EpochPrompts(prompts, seed, keys.order)
        order = None if keys.counts(streaming) else ProblemOrder(train, keys, ProblemScores())
        held_out = None
        # a started run has a number here
        wanted = run.eval.n_problems(cpu=False) if run.reward or targets else 0
        if wanted:
            problems, kept = task.examples("eval"), replace(targets, required=False) if targets else None
            held_out = PromptSet(problems, tokenizer, *limits, f"{label}eval", name, wanted, kept, tools, last_turn)
        columns, rewards = columns_of(examples[0]), rewards_for(task, run.reward)
        return cls(name, key_of(run.task, name), train, held_out, wanted, columns, rewards, environment, order)

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task. With an order, draws are made one after the other."""
        with errors_below(self.key):
            return self.order.draw(uid) if self.order else self.train.draw(nth, uid)

    def redraw(self, nth: int, row: int | None, uid: str) -> Prompt | None:
        """The prompt of an earlier draw of this task: of a row, if its order uses scores; None without that row."""
        with errors_below(self.key):
            by_row = self.order is not None and row is not None
            return self.train.problem(row, uid) if by_row else self.train.draw(nth, uid)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompts of a run's tasks, and the scheduler and the curriculum that draw from them."""

    tokenizer: PreTrainedTokenizerBase
    tasks: list[TaskPrompts]
    scheduler: TaskScheduler
    curriculum: Curriculum

    @classmethod
    def of(cls, run: Run, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int] = frozenset()) -> PromptSource:
        """Load all tasks. Raises ConfigError if one has no usable prompts, or trains on an evaluation prompt.

        end_ids: tokens that end a completion, beside the tokenizer's; supervised training teaches the one that the chat
        template writes.
        """
        chosen = tasks_of(run.task)
        tasks = []
        for name, task in chosen.items():
            with errors_below(key_of(run.task, name)):
                limit = run.rollout.max_completion_tokens
                targets = Targets.of(task, tokenizer, limit, end_ids) if run.algorithm.supervised else None
                tasks.append(TaskPrompts.of(name, task, run, tokenizer, len(chosen) == 1, targets))
        _refuse_overlap(tasks, chosen)
        for one in tasks:
            with errors_below(one.key):
                one.train.draw(0, "")  # fails early if streamed rows are unusable
        weights = [getattr(task, "weight", 1.0) for task in chosen.values()]
        orders = {task.name: task.order for task in tasks if task.order}
        scores = {task.name: orders[task.name].scores if task.order else ProblemScores() for task in tasks}
        return cls(tokenizer, tasks, TaskScheduler(weights, run.seed), Curriculum(scores, orders))

    def draw(self, number: int) -> Prompt:
        """The prompt of the run's draw number `number`. The draws of a task with a curriculum are made in order."""
        task, nth = self._turn(number)
        return task.draw(nth, uid=f"{number}")

    def redraw(self, number: int, row: int | None = None) -> Prompt | None:
        """The prompt of an earlier draw. row: that of its example, which a task with a curriculum needs.

        None if the task has no such row now.
        """
        task, nth = self._turn(number)
        return task.redraw(nth, row, uid=f"{number}")

    def drawn(self, draws: int) -> dict[str, int]:
        """How many of the first `draws` draws each task has."""
        counts = [draws] if len(self.tasks) == 1 else self.scheduler.drawn(draws)
        return {task.name: count for task, count in zip(self.tasks, counts, strict=True)}

    def _turn(self, number: int) -> tuple[TaskPrompts, int]:
        """The task of a draw, and the number of earlier draws of that task."""
        if len(self.tasks) == 1:
            return self.tasks[0], number
        turn, nth = self.scheduler.of(number)
        return self.tasks[turn], nth

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
    return {name: accuracy_reward_of(task, run.reward, run.eval.reward) for name, task in tasks_of(run.task).items()}


def doubtful_choices(run: Run) -> dict[str, str]:
    """A warning where the first reward measures accuracy, but only a later one decides whether answers are right."""
    found = {}
    for name, first in accuracy_rewards_of(run).items():
        names = rewards_for(tasks_of(run.task)[name], run.reward)
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
