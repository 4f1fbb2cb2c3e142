"""The errors a user may see. Each is one sentence that says what to change, and knows its exit code."""

from __future__ import annotations

NOTHING = object()
"""The value of a key that has none to show."""


class GrpoError(Exception):
    """Anything grpocli reports without a traceback."""

    exit_code = 1


class ConfigError(GrpoError):
    """The config cannot work. Its text is `KEY=VALUE: PROBLEM; HINT`, without the parts that are not given.

    problem: what is wrong, without the key.
    key: the config key, as a user types it, or the command's option; value: what it was given.
    hint: what to do about it.
    """

    exit_code = 2

    def __init__(self, problem: str, *, key: str = "", value: object = NOTHING, hint: str = "") -> None:
        self.problem, self.key, self.value, self.hint = problem, key, value, hint
        super().__init__(problem)

    def __str__(self) -> str:
        subject = self.key if self.value is NOTHING else f"{self.key}={self.value}"
        sentence = f"{subject}: {self.problem}" if subject else self.problem
        return f"{sentence}; {self.hint}" if self.hint else sentence

    def with_key(self, key: str) -> ConfigError:
        """The same error for another key."""
        return ConfigError(self.problem, key=key, value=self.value, hint=self.hint)


class RunError(GrpoError):
    """The run failed after it had started."""


class EngineError(RunError):
    """The rollout engine failed, or could not prove that it has the trainer's weights."""


class ServiceGone(RunError):
    """A service that the run needs is unavailable: the trainer saves a checkpoint, and the run can be resumed."""

    exit_code = 3


class EngineGone(ServiceGone, EngineError):
    """The engine is gone and does not come back."""


class RewardError(RunError):
    """More samples could not be scored than the config allows."""


class RewardGone(ServiceGone, RewardError):
    """Too many samples could not be scored because a scoring service was unavailable."""


class Stopped(GrpoError):
    """A signal ended the run after a checkpoint: run it again with `resume=`."""

    exit_code = 3
