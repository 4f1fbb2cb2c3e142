"""The interface of tasks, the keys that all of them share, and task=[A,B]: several tasks in one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from grpocli.config.parts import Escaped, UserCode, named, nearest, one_of, require, require_part, section
from grpocli.config.user_code import check_exists
from grpocli.environments.environment import TOOLS_KEY, EnvironmentConfig
from grpocli.environments.tools import READY
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.config.schema import Run

ORDERS = ("shuffled", "file", "difficulty")
Example = dict[str, Any]
"""`prompt` (a string, or a list of messages with `role` and `content`) and any further columns."""
Indices: TypeAlias = NDArray[np.int64]


def permutation(n: int, *seed: int) -> Indices:
    """The numbers below n, in an order that depends only on n and the seed."""
    # numpy guarantees the raw bits of a generator between versions, but not its permutations
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(bits, kind="stable")


def columns_of(example: Example) -> list[str]:
    """The columns that rewards get with an example like this one."""
    return sorted({*example, "task_name"} - {"prompt"})


class Task(Protocol):
    """A choice of the config group `task`."""

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`; random access, the same at every call.

        Raises ConfigError, naming the key, if the data cannot be read, lacks a column, or is empty.
        """
        ...


@section("task")
class BaseTask:
    """Keys that all tasks share."""

    weight: float = 1.0
    """Share of the prompts in a mixture, relative to the weights of the other tasks."""
    rewards: list[str] | None = None
    """Names of the run's rewards that score this task's completions; null: all. The first of them scores evaluations of
    the task."""
    task_name: str | None = None
    """Name of the task if it is the run's only one; null: the name of its choice."""
    order: str = "shuffled"
    """Order of the training prompts: `shuffled` anew in each epoch, the `file`'s, or by `difficulty`, from easy to hard
    in each epoch."""
    difficulty_column: str | None = None
    """Column that order=difficulty sorts by, larger is harder; `-NAME`: larger is easier, such as a solve rate."""
    allow_overlap: bool = False
    """Allow evaluation on prompts that are also trained on."""
    target_template: Escaped | None = None
    """Answer that `grpocli sft` teaches, text with {column} fields. null: the last turn of a conversation that ends
    with the assistant's; otherwise task.shot_template, or {answer} in a task that has none."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """The environment that answers the model's turns."""
    tools: list[UserCode] = field(default_factory=list)
    """Functions that the model may call, FILE.py:NAME or module:NAME with type hints and a docstring; `calculator` and
    `python` are built in. environment.turns, turn_tokens, timeout, workers and env are theirs, too."""
    max_tool_calls: int = 16
    """Most calls of tools in an episode; further ones are answered with an error."""
    max_tool_tokens: int = 256
    """Most tokens of a tool's result; the rest is cut off."""

    def check_ready(self) -> None:
        """Raise ConfigError if this machine lacks something that the task names. Loads nothing."""
        if self.environment.name:
            check_exists(self.environment.name, "task.environment.name")
        for tool in self.tools:
            if ":" in tool:
                check_exists(tool, TOOLS_KEY)
        self.environment.check_variables()

    def __post_init__(self) -> None:
        require(self, "weight", 0 < self.weight < math.inf, "must be above 0 and finite")
        require(self, "rewards", self.rewards != [], "name at least one reward, or leave it null for all")
        one_of(self, "order", ORDERS)
        by_column = (self.difficulty_column is not None) == (self.order == "difficulty")
        require(self, "difficulty_column", by_column, "goes with task.order=difficulty: give both, or neither")
        known = [tool for tool in self.tools if ":" in tool or tool in READY]
        require(self, "tools", known == self.tools, f"name functions as FILE.py:NAME, or take {', '.join(READY)}")
        alone = not (self.tools and self.environment.name)
        require(self, "tools", alone, "a task with environment.name has no tools: give one of the two")
        require(self, "max_tool_calls", self.max_tool_calls >= 1, "must be at least 1")
        require(self, "max_tool_tokens", self.max_tool_tokens >= 1, "must be at least 1")

    def check_run(self, run: Run) -> None:
        """Require rewards of this run that can measure accuracy, and that its method can play the task."""
        names = list(run.reward) if self.rewards is None else self.rewards
        for name in names:
            problem = f"choose some of this run's rewards: {', '.join(run.reward)}{nearest(name, run.reward)}"
            require(self, "rewards", name in run.reward, problem)
        measures = run.eval.reward if run.eval.reward in names else next(iter(names), None)
        if measures is not None and run.reward[measures].sees_group:
            problem = "scores a group by its other rewards, so it cannot measure accuracy: put another one first"
            raise ConfigError(problem, key="reward", value=f"[{measures}]")
        weight = run.algorithm.question_weight
        if measures is not None and getattr(weight, "needs_accuracy", False):
            reward = run.reward[weight.reward or measures]
            if (getattr(reward, "right", 1), getattr(reward, "wrong", 0)) != (1, 0):
                problem = "algorithm.question_weight reads an accuracy from it: leave right=1 and wrong=0"
                raise ConfigError(problem, key=reward.config_key)
        if run.algorithm.supervised and self.environment.name is not None:
            problem = "supervised training has one answer for each prompt, and this task is played in turns"
            raise ConfigError(problem, key="task.environment.name", value=self.environment.name)


@named("task/mixture")
class Mixture:
    """Tasks by name. `task.NAME.weight` is the share of a task's prompts, relative to the other weights."""

    def __init__(self, **tasks: Task) -> None:
        if not tasks:
            raise ConfigError(
                "has no tasks", key="task", value="mixture", hint="give task=[A,B], or +task@task.NAME=CHOICE"
            )
        for name, task in tasks.items():
            require_part(task, f"task.{name}")
        self.tasks = tasks


def key_of(chosen: object, name: str) -> str:
    """The prefix of a task's keys: `task`, or `task.NAME` in a mixture."""
    return f"task.{name}" if isinstance(chosen, Mixture) else "task"


@contextmanager
def errors_below(key: str) -> Iterator[None]:
    """Raise ConfigErrors of a task with the key that the run has: `task.gsm8k.path` instead of `task.path`.

    The text of an error whose key is outside of `task` names the task.
    """
    try:
        yield
    except ConfigError as error:
        if key == "task" or f"{error.key}.".startswith(f"{key}."):
            raise
        if not error.key or f"{error.key}.".startswith("task."):
            raise error.with_key(key + error.key.removeprefix("task")) from error
        raise ConfigError(f"{error.problem} ({key})", key=error.key, value=error.value, hint=error.hint) from error


def without_answers(chosen: Any) -> Any:
    """The task, or the mixture, that requires no column of answers."""
    if isinstance(chosen, Mixture):
        return Mixture(**{name: without_answers(task) for name, task in chosen.tasks.items()})
    has_answers = is_dataclass(chosen) and getattr(chosen, "answer_column", None) is not None
    return replace(chosen, answer_column=None) if has_answers else chosen
