"""The errors that users see: one sentence that says what to change, and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NO_VALUE = object()
"""Marks a ConfigError without a value."""


class GrpoError(Exception):
    """Base class of errors that are reported without a traceback.

    cause: what happened. remedy: how to go on, which ends the text.
    """

    exit_code = 1

    def __init__(self, cause: str = "", *, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause, self.remedy = str(cause), remedy

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}" if self.remedy else self.cause


class ConfigError(GrpoError):
    """The config cannot work. Its text is `KEY=VALUE: PROBLEM; HINT`, without the parts that are not given.

    problem: what is wrong, without the key. key: the config key as a user types it, or a command's option.
    value: the key's value. hint: the remedy.
    """

    exit_code = 2

    def __init__(self, problem: str, *, key: str = "", value: object = NO_VALUE, hint: str = "") -> None:
        self.problem, self.key, self.value, self.hint = problem, key, value, hint
        subject = key if value is NO_VALUE else f"{key}={value}"
        super().__init__(f"{subject}: {problem}" if subject else problem, remedy=hint)

    def with_key(self, key: str) -> ConfigError:
        """The same error for another key."""
        return ConfigError(self.problem, key=key, value=self.value, hint=self.hint)

    def with_note(self, note: str) -> ConfigError:
        """The same error with a note in parentheses at its end."""
        if self.hint:
            return ConfigError(self.problem, key=self.key, value=self.value, hint=f"{self.hint} ({note})")
        return ConfigError(f"{self.problem} ({note})", key=self.key, value=self.value)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; of an error of the system without its number."""
    system = error.strerror if isinstance(error, OSError) else None
    return ((system or str(error)).splitlines() or [""])[0]


@contextmanager
def config_errors(
    *kinds: type[BaseException], says: str = "{}", why: Callable[[Any], str] = first_line, **where: Any
) -> Iterator[None]:
    """A block whose errors of these kinds are raised as ConfigError; those that are one already pass.

    says: the problem, with `{}` for `why(error)`. where: key, value and hint of the ConfigError.
    """
    try:
        yield
    except GrpoError:
        raise
    except kinds as error:
        raise ConfigError(says.replace("{}", why(error)), **where) from error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class RunError(GrpoError):
    """The run failed after its start."""


class EngineError(RunError):
    """The rollout engine failed, or its weights could not be verified."""


class ServiceGone(RunError):
    """A service that the run needs is unavailable: the trainer saves a checkpoint, and the run can be resumed."""

    exit_code = 3


class EngineGone(ServiceGone, EngineError):
    """The engine is unavailable and was not restarted."""


class RewardError(RunError):
    """A step cannot train on its scores: more are missing than the config allows, or too few groups differ in them."""


class RewardGone(ServiceGone, RewardError):
    """Too many samples could not be scored because a scoring service was unavailable."""


class Stopped(GrpoError):
    """The run ended after a checkpoint, by a signal or because a service was lost; `resume=` continues it."""

    exit_code = 3
