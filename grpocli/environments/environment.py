"""What a model acts in, turn by turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple, Protocol

from grpocli.config.parts import Escaped, UserCode, require, section
from grpocli.types import Message

ROLES = ("system", "user", "tool", "developer")
"""Of what an environment says: never the model's own."""


class Step(NamedTuple):
    """What came of a turn; a plain tuple of the same four will do.

    observation: messages that the model sees next; empty where there is nothing to say.
    reward: a number, or several by name; those of an episode's turns are added up.
    done: the episode is over, and what was observed is not shown.
    metadata: the episode's state from here on, JSON values.
    """

    observation: list[Message]
    reward: float | Mapping[str, float]
    done: bool
    metadata: dict[str, Any]


class Environment(Protocol):
    """A class of your own, made once in each worker process with the arguments `task.environment.arguments`.

    It keeps nothing of an episode: any process may be asked for its next step. What a step has to know is in
    `metadata`, JSON values.
    """

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The state of a new episode, from its example's columns."""
        ...

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        """After the model's turn, the last of the messages: those of the prompt, of the model and of this one."""
        ...


@section("task.environment")
class Play:
    """The environment of a task.

    name: the class, FILE.py:NAME or module:NAME; null: none, a completion is one turn.
    arguments: what the class is called with.
    turns: the model's, at most; the episode ends after the last one. turn_tokens: of each, at most; null: as many as
        rollout.max_completion_tokens leaves, which bounds all turns and the environment's words together.
    stop: strings that end a turn.
    timeout: seconds for a step. workers: processes that step episodes side by side; 0 is one for each core.
    env: environment variables that the class needs, by their names; keys and tokens are not passed on otherwise.
    """

    name: UserCode | None = None
    """The class, FILE.py:NAME or module:NAME. null: no environment, a completion is one turn."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    turns: int = 8
    """Most turns of the model in an episode."""
    turn_tokens: int | None = None
    """Most tokens of a turn. null: what is left of rollout.max_completion_tokens, which bounds all turns and the
    environment's messages together."""
    stop: list[Escaped] = field(default_factory=list)
    """Strings that end a turn."""
    timeout: float = 10.0
    """Seconds for a step of the environment."""
    workers: int = 0
    """Processes that step episodes in parallel; 0: one per core."""
    env: list[str] = field(default_factory=list)
    """Names of the environment variables that the class needs; keys and tokens are not passed otherwise."""

    def __post_init__(self) -> None:
        require(self, "name", self.name is None or ":" in self.name, "must be FILE.py:NAME or module:NAME")
        require(self, "turns", self.turns >= 1, "must be at least 1")
        require(self, "turn_tokens", self.turn_tokens is None or self.turn_tokens >= 1, "must be at least 1")
        require(self, "stop", all(self.stop), "a stop string must not be empty")
        require(self, "timeout", 0 < self.timeout < math.inf, "must be above 0 seconds")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")


def play_of(task: object) -> Play | None:
    """The environment of a task that has one."""
    play: Play | None = getattr(task, "environment", None)
    return play if play and play.name else None
