"""Where prompts come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from grpocli.config.parts import require, section
from grpocli.config.user_code import check_exists
from grpocli.environments.environment import Play

Example = dict[str, Any]
"""`prompt` (a string, or a list of messages with `role` and `content`) and any further columns."""


def columns_of(example: Example) -> list[str]:
    """What rewards see of the examples that are like this one."""
    return sorted({*example, "task_name"} - {"prompt"})


class Task(Protocol):
    """A choice of the config group `task`."""

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`; random access, the same at every call.

        Raises ConfigError, naming the key, where the data cannot be read, lacks a column, or is empty.
        """
        ...


@section("task")
class BaseTask:
    """What the tasks that ship have in common.

    weight: a mixture draws from each task in proportion to it.
    rewards: which of the run's rewards score this task's completions, by name (null: all). Evaluations of the task are
        judged by the first of them.
    max_reward_errors: the run stops when a larger share of this task's samples in a step could not be scored (1: never;
        null: judged together with other tasks, by rollout.max_reward_errors).
    allow_overlap: evaluate on prompts that are trained on, too.
    task_name: what it is called where it is the run's only one (null: as its class is registered).
    environment: what answers the model's turns; see `Play`.
    """

    weight: float = 1.0
    rewards: list[str] | None = None
    max_reward_errors: float | None = None
    task_name: str | None = None
    allow_overlap: bool = False
    environment: Play = Play()

    def check_ready(self) -> None:
        """Raise ConfigError where this machine lacks something that the task names. Loads nothing."""
        if self.environment.name:
            check_exists(self.environment.name, "task.environment.name")

    def __post_init__(self) -> None:
        require(self, "weight", 0 < self.weight < math.inf, "must be above 0 and finite")
        require(self, "rewards", self.rewards != [], "name at least one reward, or leave it null for all")
        share = self.max_reward_errors
        require(self, "max_reward_errors", share is None or 0 <= share <= 1, "must be between 0 and 1, or null")
