"""task=[A,B]: several tasks at once, each with a share of the prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.rewards.verdict import Limit

if TYPE_CHECKING:
    from grpocli.tasks.task import Task


class Mixture:
    """Tasks by name. `task.NAME.weight` says what share of the prompts a task has, beside the others' weights."""

    def __init__(self, **tasks: Task) -> None:
        if not tasks:
            raise ConfigError("task=mixture: holds no task; give task=[A,B], or +task@task.NAME=CHOICE")
        self.tasks = tasks


def tasks_of(chosen: object) -> dict[str, Task]:
    """By name: those of a mixture, or the one that was chosen, called as its choice is."""
    from grpocli.explain.choices import choice_of

    if isinstance(chosen, Mixture):
        return dict(chosen.tasks)
    one: Task = chosen  # type: ignore[assignment]
    return {getattr(chosen, "task_name", None) or choice_of("task", chosen): one}


def limits_of(chosen: object) -> dict[str, Limit]:
    """Of tasks that are judged by themselves, how many of their samples may fail."""
    shares = {name: getattr(task, "max_reward_errors", None) for name, task in tasks_of(chosen).items()}
    return {
        name: Limit(key_of(chosen, name, "max_reward_errors"), share)
        for name, share in shares.items()
        if share is not None
    }


def key_of(chosen: object, task: str, key: str) -> str:
    """The config key of one of the tasks."""
    return f"task.{task}.{key}" if isinstance(chosen, Mixture) else f"task.{key}"
