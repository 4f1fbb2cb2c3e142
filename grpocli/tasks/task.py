"""The interface of tasks, and the keys that all of them share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from grpocli.config.parts import Escaped, one_of, require, section
from grpocli.config.user_code import check_exists
from grpocli.environments.environment import EnvironmentConfig

ORDERS = ("shuffled", "file", "difficulty")
Example = dict[str, Any]
"""`prompt` (a string, or a list of messages with `role` and `content`) and any further columns."""


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
    max_reward_errors: float | None = None
    """Largest share of this task's samples in a step that may fail to be scored; above it the run stops. 1: no limit;
    null: counted together with other tasks, by rollout.max_reward_errors."""
    task_name: str | None = None
    """Name of the task if it is the run's only one; null: the name of its choice."""
    order: str = "shuffled"
    """Order of the training prompts: `shuffled` anew in each epoch, the `file`'s, or by `difficulty`, from easy to hard
    in each epoch."""
    difficulty_column: str | None = None
    """Column that order=difficulty sorts by, larger is harder; `-NAME`: larger is easier, such as a solve rate. null:
    the share of a problem's completions so far that the accuracy reward calls right."""
    no_resampling_pass_rate: float | None = None
    """A problem rests, for the rest of the run, when at least this share of its last group is right; null: never. When
    all problems rest, all are drawn again."""
    allow_overlap: bool = False
    """Allow evaluation on prompts that are also trained on."""
    target_template: Escaped | None = None
    """Answer that `grpocli sft` teaches, text with {column} fields. null: the last turn of a conversation that ends
    with the assistant's; otherwise task.shot_template, or {answer} in a task that has none."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """The environment that answers the model's turns."""

    def check_ready(self) -> None:
        """Raise ConfigError if this machine lacks something that the task names. Loads nothing."""
        if self.environment.name:
            check_exists(self.environment.name, "task.environment.name")

    def __post_init__(self) -> None:
        require(self, "weight", 0 < self.weight < math.inf, "must be above 0 and finite")
        require(self, "rewards", self.rewards != [], "name at least one reward, or leave it null for all")
        one_of(self, "order", ORDERS)
        by_column = self.difficulty_column is None or self.order == "difficulty"
        require(self, "difficulty_column", by_column, "sets the order: give task.order=difficulty, or leave it null")
        rate = self.no_resampling_pass_rate
        require(
            self, "no_resampling_pass_rate", rate is None or 0 < rate <= 1, "must be above 0 and at most 1, or null"
        )
        share = self.max_reward_errors
        require(self, "max_reward_errors", share is None or 0 <= share <= 1, "must be between 0 and 1, or null")
