"""What a run trains and evaluates on: the prompts of its tasks, in a reproducible order."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from grpocli.errors import ConfigError
from grpocli.rewards.scoring import excerpt
from grpocli.tasks.mixture import tasks_of
from grpocli.tasks.order import Order, Rotation
from grpocli.tasks.prompts import PromptSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.data import Prompt
    from grpocli.environments.environment import Play
    from grpocli.tasks.task import Task


@dataclass(frozen=True, slots=True)
class TaskData:
    """One task's prompts. columns: what rewards see of an example; rewards: those that score it.

    play: its environment.
    """

    name: str
    train: PromptSet
    held_out: PromptSet | None
    order: Order
    columns: list[str]
    rewards: list[str]
    play: Play | None

    @classmethod
    def of(cls, name: str, task: Task, run: Run, tokenizer: PreTrainedTokenizerBase, alone: bool) -> Self:
        """alone: it is the run's only task."""
        limits = run.rollout.max_prompt_tokens, run.rollout.long_prompts
        label = "" if alone else f"{name} "
        examples = task.examples("train")
        train = PromptSet(examples, tokenizer, *limits, f"{label}train", name)
        held_out = None
        if run.eval.problems:
            problems = task.examples("eval")
            problems = [problems[i] for i in range(min(run.eval.problems, len(problems)))]
            held_out = PromptSet(problems, tokenizer, *limits, f"{label}eval", name)
        order = Order(len(train), run.seed, *([] if alone else [zlib.crc32(name.encode())]))
        columns = sorted({*examples[0], "task_name"} - {"prompt"})
        play: Play | None = getattr(task, "environment", None)
        return cls(
            name, train, held_out, order, columns, rewards_for(task, run.reward), play if play and play.name else None
        )


@dataclass(frozen=True, slots=True)
class Data:
    """The tasks of a run, and whose turn it is."""

    tokenizer: PreTrainedTokenizerBase
    tasks: list[TaskData]
    rotation: Rotation

    @classmethod
    def of(cls, run: Run, tokenizer: PreTrainedTokenizerBase) -> Data:
        """Raises ConfigError where a task has no usable prompts, or one that it trains and evaluates on."""
        chosen = tasks_of(run.task)
        tasks = [TaskData.of(name, task, run, tokenizer, len(chosen) == 1) for name, task in chosen.items()]
        _refuse_overlap(tasks, chosen)
        weights = [getattr(task, "weight", 1.0) for task in chosen.values()]
        return cls(tokenizer, tasks, Rotation(weights, run.seed))

    def draw(self, number: int) -> Prompt:
        """The prompt of the run's draw number `number`."""
        if len(self.tasks) == 1:
            task, nth = self.tasks[0], number
        else:
            turn, nth = self.rotation.of(number)
            task = self.tasks[turn]
        return task.train.prompt(task.order.index(nth), uid=f"{number}")

    def problems(self) -> list[Prompt]:
        """To evaluate on, task by task."""
        found = [(task.held_out, i) for task in self.tasks if task.held_out for i in range(len(task.held_out))]
        return [held_out.prompt(i, uid=f"eval-{place}") for place, (held_out, i) in enumerate(found)]

    @property
    def rewards(self) -> dict[str, list[str]]:
        """Which rewards score each task, by its name."""
        return {task.name: task.rewards for task in self.tasks}

    @property
    def plays(self) -> dict[str, Play]:
        """The environments of the tasks that have one."""
        return {task.name: task.play for task in self.tasks if task.play}

    @property
    def reports(self) -> list[str]:
        """What was left out, in sentences."""
        sets = [part for task in self.tasks for part in (task.train, task.held_out) if part]
        return [part.report for part in sets if part.report]


def rewards_for(task: object, rewards: Mapping[str, object]) -> list[str]:
    """The names of the run's rewards that score a task's completions."""
    wanted: Sequence[str] | None = getattr(task, "rewards", None)
    return list(rewards if wanted is None else wanted)


def _refuse_overlap(tasks: Sequence[TaskData], chosen: Mapping[str, Task]) -> None:
    for evaluated in tasks:
        if not evaluated.held_out or getattr(chosen[evaluated.name], "allow_overlap", False):
            continue
        for trained in tasks:
            if shared := evaluated.held_out.shared_with(trained.train):
                first = evaluated.held_out.prompt(shared[0], "").text
                raise ConfigError(
                    f"task: {len(shared)} of {len(evaluated.held_out)} problems that {evaluated.name} is evaluated on "
                    f"are trained on in {trained.name}, the first is {excerpt(str(first))}; give other data, or "
                    "task.allow_overlap=true"
                )
