"""The errors a user may see. Each is one sentence that says what to change, and knows its exit code."""

from __future__ import annotations


class GrpoError(Exception):
    """Anything grpocli reports without a traceback."""

    exit_code = 1


class ConfigError(GrpoError):
    """The config cannot work: a key, its value, and what to do about it."""

    exit_code = 2

    @classmethod
    def of(cls, key: str, value: object, problem: str) -> ConfigError:
        """`rollout.group_size=1: must be at least 2`."""
        return cls(f"{key}={value}: {problem}")


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
