"""task=[A,B]: several tasks in one run, each with a share of the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from grpocli.config.parts import named
from grpocli.config.user_parts import choice_of, is_spec, name_of
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
        self.tasks = tasks


def key_of(chosen: object, name: str) -> str:
    """The prefix of a task's keys: `task`, or `task.NAME` in a mixture."""
    return f"task.{name}" if isinstance(chosen, Mixture) else "task"


@contextmanager
def about(key: str) -> Iterator[None]:
    """Raise errors about `task.path` again as errors about the key in the run, such as `task.gsm8k.path`."""
    try:
        yield
    except ConfigError as error:
        if key == "task":
            raise
        raise below(error, key) from error


def below(error: ConfigError, key: str) -> ConfigError:
    """The error with `key` instead of `task` in its key; one about another part of the config ends with `key`."""
    own, name = error.key, error.key.removeprefix("task")
    if own == key or own.startswith(f"{key}."):
        return error
    if own == "task" or own.startswith("task."):
        return error.with_key(key + name)
    if not own:
        return error.with_key(key)
    note = f"{error.hint} ({key})" if error.hint else ""
    problem = error.problem if note else f"{error.problem} ({key})"
    return ConfigError(problem, key=own, value=error.value, hint=note)


def tasks_of(chosen: object) -> dict[str, Task]:
    """The tasks of a run by name: those of a mixture, or the only one, named after its choice."""
    if isinstance(chosen, Mixture):
        return dict(chosen.tasks)
    one: Task = chosen  # type: ignore[assignment]
    choice = choice_of("task", chosen)
    return {getattr(chosen, "task_name", None) or (name_of(choice) if is_spec(choice) else choice): one}


def limits_of(chosen: object) -> dict[str, ErrorLimit]:
    """`max_reward_errors` of each task that sets it."""
    shares = {name: getattr(task, "max_reward_errors", None) for name, task in tasks_of(chosen).items()}
    return {
        name: ErrorLimit(f"{key_of(chosen, name)}.max_reward_errors", share)
        for name, share in shares.items()
        if share is not None
    }
