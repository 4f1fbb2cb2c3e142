"""task=[A,B]: several tasks in one run, each with a share of the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import named, require_part
from grpocli.config.user_parts import choice_of, name_of
from grpocli.errors import ConfigError
from grpocli.rewards.score_stats import ErrorLimit

if TYPE_CHECKING:
    from grpocli.tasks.task import Task


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
    """Raise ConfigErrors of a task with the key that the run has: `task.gsm8k.path` instead of `task.path`."""
    try:
        yield
    except ConfigError as error:
        if key == "task":
            raise
        raise _error_below(error, key) from error


def _error_below(error: ConfigError, key: str) -> ConfigError:
    """The error with `key` instead of `task` in its key; the text names `key` if the key is outside of `task`."""
    if error.key == key or error.key.startswith(f"{key}."):
        return error
    if error.key == "task" or error.key.startswith("task."):
        return error.with_key(key + error.key.removeprefix("task"))
    if not error.key:
        return error.with_key(key)
    note = f"{error.hint} ({key})" if error.hint else ""
    problem = error.problem if note else f"{error.problem} ({key})"
    return ConfigError(problem, key=error.key, value=error.value, hint=note)


def tasks_of(chosen: object) -> dict[str, Task]:
    """The tasks of a run by name: those of a mixture, or the only one, named after its choice."""
    if isinstance(chosen, Mixture):
        return dict(chosen.tasks)
    one: Task = chosen  # type: ignore[assignment]
    choice = choice_of("task", chosen)
    return {getattr(chosen, "task_name", None) or name_of(choice): one}


def without_answers(chosen: Any) -> Any:
    """The task, or the mixture, that requires no column of answers."""
    if isinstance(chosen, Mixture):
        return Mixture(**{name: without_answers(task) for name, task in chosen.tasks.items()})
    has_answers = is_dataclass(chosen) and getattr(chosen, "answer_column", None) is not None
    return replace(chosen, answer_column=None) if has_answers else chosen


def error_limits_of(chosen: object) -> dict[str, ErrorLimit]:
    """{task: its `max_reward_errors`} of the tasks that set it."""
    shares = {name: getattr(task, "max_reward_errors", None) for name, task in tasks_of(chosen).items()}
    return {
        name: ErrorLimit(f"{key_of(chosen, name)}.max_reward_errors", share)
        for name, share in shares.items()
        if share is not None
    }
