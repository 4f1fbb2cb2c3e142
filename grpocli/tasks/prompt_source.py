"""The prompts that a run trains and evaluates on, in a reproducible order."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from grpocli.environments.environment import environment_of
from grpocli.errors import ConfigError
from grpocli.rewards.score_stats import excerpt
from grpocli.tasks.jsonl import Jsonl
from grpocli.tasks.mixture import errors_below, key_of, tasks_of
from grpocli.tasks.order import Order, TaskScheduler
from grpocli.tasks.prompts import PromptSet
from grpocli.tasks.streaming import StreamedPrompts
from grpocli.tasks.task import columns_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.tasks.task import Task
    from grpocli.types import Prompt


class TrainingPrompts(Protocol):
    """The training prompts of one task. report: a sentence about excluded prompts, or empty."""

    @property
    def report(self) -> str: ...

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task."""
        ...


@dataclass(frozen=True, slots=True)
class EpochPrompts:
    """Prompts of a task that is read whole, each once per epoch."""

    prompts: PromptSet
    order: Order

    @property
    def report(self) -> str:
        return self.prompts.report

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task."""
        return self.prompts.prompt(self.order.index(nth), uid)


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """The prompts of one task, with its columns, rewards and environment.

    key: prefix of the task's config keys. columns: columns that rewards get. rewards: names of the rewards that score
    its completions. wanted: problems to evaluate on, where the task has so many.
    """

    name: str
    key: str
    train: TrainingPrompts
    held_out: PromptSet | None
    wanted: int
    columns: list[str]
    rewards: list[str]
    environment: EnvironmentConfig | None

    @classmethod
    def of(cls, name: str, task: Task, run: Run, tokenizer: PreTrainedTokenizerBase, alone: bool) -> Self:
        """Load a task. alone: it is the run's only task."""
        limits = run.rollout.max_prompt_tokens, run.rollout.long_prompts
        label = "" if alone else f"{name} "
        seed = (run.seed,) if alone else (run.seed, zlib.crc32(name.encode()))
        examples = task.examples("train")
        train: TrainingPrompts
        if isinstance(task, Jsonl) and task.streaming:
            train = StreamedPrompts(task.stream, tokenizer, *limits, name, task.shuffle_buffer, seed)
        else:
            prompts = PromptSet(examples, tokenizer, *limits, f"{label}train", name)
            train = EpochPrompts(prompts, Order(len(prompts), *seed))
        held_out = None
        wanted = run.eval.n_problems(cpu=False)  # a started run has a number here
        if wanted:
            problems = task.examples("eval")
            held_out = PromptSet(problems, tokenizer, *limits, f"{label}eval", name, wanted)
        columns = columns_of(examples[0])
        return cls(
            name,
            key_of(run.task, name),
            train,
            held_out,
            wanted,
            columns,
            rewards_for(task, run.reward),
            environment_of(task),
        )

    def draw(self, nth: int, uid: str) -> Prompt:
        """The prompt of the nth draw of this task."""
        with errors_below(self.key):
            return self.train.draw(nth, uid)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompts of a run's tasks, and the scheduler that draws from them."""

    tokenizer: PreTrainedTokenizerBase
    tasks: list[TaskPrompts]
    scheduler: TaskScheduler

    @classmethod
    def of(cls, run: Run, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
        """Load all tasks. Raises ConfigError if one has no usable prompts, or trains on an evaluation prompt."""
        chosen = tasks_of(run.task)
        tasks = []
        for name, task in chosen.items():
            with errors_below(key_of(run.task, name)):
                tasks.append(TaskPrompts.of(name, task, run, tokenizer, len(chosen) == 1))
        _refuse_overlap(tasks, chosen)
        for one in tasks:
            one.draw(0, "")  # fails early if streamed rows are unusable
        weights = [getattr(task, "weight", 1.0) for task in chosen.values()]
        return cls(tokenizer, tasks, TaskScheduler(weights, run.seed))

    def draw(self, number: int) -> Prompt:
        """The prompt of the run's draw number `number`."""
        if len(self.tasks) == 1:
            task, nth = self.tasks[0], number
        else:
            turn, nth = self.scheduler.of(number)
            task = self.tasks[turn]
        return task.draw(nth, uid=f"{number}")

    def problems(self) -> list[Prompt]:
        """The prompts to evaluate on, task by task."""
        found = [(task.held_out, i) for task in self.tasks if task.held_out for i in range(len(task.held_out))]
        return [held_out.prompt(i, uid=f"eval-{place}") for place, (held_out, i) in enumerate(found)]

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
    """`accuracy_reward_of` each task of a run."""
    return {name: accuracy_reward_of(task, run.reward, run.eval.reward) for name, task in tasks_of(run.task).items()}


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
                key, problems = evaluated.key, len(evaluated.held_out)
                raise ConfigError(
                    f"{len(shared)} of the {problems} evaluation problems of {evaluated.name} are also training "
                    f"problems of {trained.name}; the first is {first}",
                    key=key,
                    hint=f"evaluate on other data, or set {key}.allow_overlap=true",
                )
