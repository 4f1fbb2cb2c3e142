"""The prompts that a run trains and evaluates on.

Which task and which problem is drawn next are functions of the seed and of the draw's number alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from grpocli.environments.environment import loaded_environment_of
from grpocli.errors import ConfigError
from grpocli.rewards.reward import Correctness
from grpocli.rewards.scorer import excerpt
from grpocli.tasks.prompts import PromptMaker, PromptSet
from grpocli.tasks.task import Indices, columns_of, errors_below, key_of, permutation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.tasks.task import Task
    from grpocli.types import Prompt

GOLDEN = 2654435769
"""2**32 divided by the golden ratio: its multiples, modulo 2**32, are spread evenly."""


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """The prompts of one task, with its columns, rewards and environment."""

    name: str
    key: str
    """Prefix of the task's config keys."""
    train: PromptSet
    order: Callable[[int], Indices]
    """The order of the training prompts in an epoch: their indices."""
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
        train, held_out = PromptSet(examples, maker, f"{label}train"), None
        order = _order_of(task, train, seed)
        # a started run has a number here
        wanted = run.eval.n_problems(cpu=False) if run.reward or maker.targets else 0
        if wanted:
            held_out = PromptSet(task.examples("eval"), maker, f"{label}eval", wanted, needs_targets=False)
        columns, rewards = columns_of(examples[0]), rewards_for(task, run.reward)
        environment = loaded_environment_of(task)
        return cls(name, key_of(run.task, name), train, order, held_out, wanted, columns, rewards, environment)

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task."""
        epoch, place = divmod(nth, len(self.train))
        with errors_below(self.key):
            return self.train.prompt(int(self.order(epoch)[place]), uid)


def _order_of(task: object, prompts: PromptSet, seed: Sequence[int]) -> Callable[[int], Indices]:
    """The order of a task's training prompts in each epoch. A task of a user may lack the keys."""
    order, column = getattr(task, "order", "shuffled"), getattr(task, "difficulty_column", None)
    values = prompts.values(column.removeprefix("-")) if column else None
    difficulty = None if values is None else difficulty_of(values, str(column), prompts.where)
    return lru_cache(maxsize=1)(lambda epoch: problem_order(len(prompts), order, difficulty, *seed, epoch))


def problem_order(n: int, order: str, difficulty: NDArray[np.float64] | None, *seed: int) -> Indices:
    """The order in which an epoch draws n problems, for a `task.order`.

    difficulty: of each problem, for `difficulty`; equally hard ones are in the shuffled order.
    """
    if order == "file":
        return np.arange(n)
    shuffled = permutation(n, *seed)
    return shuffled if difficulty is None else shuffled[np.argsort(difficulty[shuffled], kind="stable")]


def difficulty_of(values: Sequence[Any], column: str, where: Callable[[int], str]) -> NDArray[np.float64]:
    """The difficulty of problems by the values of a column, which falls with them if the column has a leading `-`.

    Numbers, also as text, are compared as numbers; otherwise all are compared as text. where: names a problem in
    errors. Raises ConfigError for a missing value.
    """
    for i, value in enumerate(values):
        if not isinstance(value, str | int | float) or value == "" or value != value:
            problem = f"{where(i)} has {value!r:.60} there; every row needs a number, or every row a text"
            raise ConfigError(problem, key="task.difficulty_column", value=column)
    sign = -1.0 if column.startswith("-") else 1.0
    with suppress(ValueError):
        numbers = [float(value) for value in values]
        if not any(map(math.isnan, numbers)):
            return sign * np.array(numbers, np.float64)
    _, ranks = np.unique([str(value) for value in values], return_inverse=True)
    return sign * ranks.astype(np.float64)


class TaskScheduler:
    """Assigns draws to tasks in proportion to their weights.

    It uses a low-discrepancy sequence: in any run of draws each task has its share, to within a few draws.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.weights = list(weights)
        self._edges = np.cumsum(weights) / np.sum(weights)
        self._start = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._task, self._nth = np.empty(0, np.int64), np.empty(0, np.int64)

    def of(self, draw: int) -> tuple[int, int]:
        """The index of a draw's task, and the number of earlier draws of that task."""
        if draw >= len(self._task):
            self._assign(max(2 * draw + 2, 1024))
        return int(self._task[draw]), int(self._nth[draw])

    def _assign(self, draws: int) -> None:
        """Compute the tasks of the first `draws` draws."""
        place = (np.arange(draws, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(self._start)) % np.uint64(2**32)
        self._task = np.searchsorted(self._edges[:-1], place / 2**32, side="right")
        self._nth = np.empty(draws, np.int64)
        for task in range(len(self._edges)):
            (own,) = np.nonzero(self._task == task)
            self._nth[own] = np.arange(len(own))


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
    def epoch(self) -> int:
        """The number of draws in which every training example is drawn once; of several tasks, the longest."""
        shares = np.array(self.scheduler.weights) / sum(self.scheduler.weights)
        sizes = [len(task.train) for task in self.tasks]
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
    """Raise ConfigError for prompts that are trained and evaluated on."""
    for evaluated in tasks:
        if not evaluated.held_out or getattr(chosen[evaluated.name], "allow_overlap", False):
            continue
        for trained in tasks:
            if shared := evaluated.held_out.shared_with(trained.train):
                first = excerpt(str(evaluated.held_out.prompt(shared[0], "").text))
                problem = f"{len(shared)} of the {len(evaluated.held_out)} evaluation problems of {evaluated.name} are"
                hint = f"evaluate on other data, or set {evaluated.key}.allow_overlap=true"
                raise ConfigError(
                    f"{problem} also training problems of {trained.name}; the first is {first}",
                    key=evaluated.key,
                    hint=hint,
                )
