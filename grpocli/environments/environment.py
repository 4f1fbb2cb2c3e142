"""The interface of environments, in which a model acts over several turns, their config, and reward=[environment]."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from grpocli.config.parts import Escaped, UserCode, part, require, section
from grpocli.errors import ConfigError
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score
from grpocli.types import Message

if TYPE_CHECKING:
    from grpocli.config.schema import Run

STEP_SHARE = 0.9
"""Share of `timeout` after which a step of a library's environment fails alone; after all of it, its worker ends, and
with it all episodes that the worker holds."""
ROLES = ("system", "user", "tool", "developer")
"""The roles of an environment's messages, which exclude the model's."""
WORKER = "grpocli.environments.worker_functions:call"
"""The function that worker processes call for environments and tools."""
TOOLS = "grpocli.environments.tools:tools"
"""The name of `task.tools` in the place of a class: calls are answered, a turn without a call ends the episode."""
TOOLS_KEY = "task.tools"
TOOL_SCHEMAS = "tool_schemas"
"""The argument of an environment whose episodes have tools; a task with a method of this name gives it."""


class Step(NamedTuple):
    """The result of a turn; a plain tuple of the same four values works too.

    observation: messages that the model sees next; may be empty.
    reward: a number, or several by name; those of an episode's turns are summed.
    done: whether the episode is over; then the model does not see the observation.
    metadata: the new state of the episode, as JSON values.
    """

    observation: list[Message]
    reward: float | Mapping[str, float]
    done: bool
    metadata: dict[str, Any]


class Environment(Protocol):
    """A class of the user. Each worker process makes one object, with the arguments `task.environment.arguments`.

    The object keeps no state of an episode, since any process may compute its next step. The state is `metadata`, JSON
    values. With `task.environment.stateful=true` all steps of an episode run in one process, so the object may keep
    what cannot be JSON, such as a connection, under a name in the metadata.

    It may have a third method, `finish(messages, metadata)`: called once for an episode that a limit ends before `step`
    does; it returns the reward, as `step` does, or None.
    """

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The state of a new episode, from the columns of its example."""
        ...

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        """The result of the model's turn, which is the last of the messages; the prompt's messages come first."""
        ...


@section("task.environment")
class EnvironmentConfig:
    """The environment of a task: its class and the limits of an episode."""

    name: UserCode | None = None
    """The class, FILE.py:NAME or module:NAME. null: no environment, a completion is one turn."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    turns: int = 8
    """Most turns of the model in an episode."""
    turn_tokens: int | None = None
    """Most tokens of a turn. null: the rest of rollout.max_completion_tokens, which bounds all turns and the
    environment's messages together."""
    stop: list[Escaped] = field(default_factory=list)
    """Strings that end a turn."""
    timeout: float = 10.0
    """Seconds for a step of the environment."""
    workers: int = 0
    """Processes that step episodes in parallel; 0: one per core."""
    stateful: bool = False
    """Whether the class's objects keep the state of running episodes; then all steps of an episode run in one process,
    and the episode fails if that process ends."""
    env: list[str] = field(default_factory=list)
    """Names of the environment variables that the class needs; keys and tokens are not passed otherwise."""

    def __post_init__(self) -> None:
        require(self, "name", self.name is None or ":" in self.name, "must be FILE.py:NAME or module:NAME")
        require(self, "turns", self.turns >= 1, "must be at least 1")
        require(self, "turn_tokens", self.turn_tokens is None or self.turn_tokens >= 1, "must be at least 1")
        require(self, "stop", all(self.stop), "a stop string must not be empty")
        require(self, "timeout", 0 < self.timeout < math.inf, "must be above 0 seconds and finite")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def check_variables(self) -> None:
        """Raise ConfigError for a name in `env` of a variable that is not set."""
        for name in self.env:
            if name not in os.environ:
                problem = "this environment variable is not set: export it, or remove it from the list"
                raise ConfigError(problem, key="task.environment.env", value=f"[{name}]")


def environment_of(task: object) -> EnvironmentConfig | None:
    """The environment of a task, or its tools as one; None if it has neither."""
    environment: EnvironmentConfig | None = getattr(task, "environment", None)
    if environment and (tools := getattr(task, "tools", None)):
        arguments = {"tools": list(tools), "max_calls": task.max_tool_calls, "max_tokens": task.max_tool_tokens}  # type: ignore[attr-defined]
        return replace(environment, name=TOOLS, arguments=arguments)
    return environment if environment and environment.name else None


def loaded_environment_of(task: object) -> EnvironmentConfig | None:
    """`environment_of`, with the tools of its episodes, for which a library may load its data."""
    environment, find = environment_of(task), getattr(task, TOOL_SCHEMAS, None)
    if environment is None or find is None:
        return environment
    return replace(environment, arguments={**environment.arguments, TOOL_SCHEMAS: find()})


@part("reward", "environment", package="reward.environment")
class EnvironmentReward(BaseReward):
    """The sum of an environment's rewards over an episode; does not apply to tasks without an environment."""

    key: str | None = None
    """Name of one of the environment's rewards; null: all of them together. For several with different weights, give
    each a YAML with `_target_: reward/environment` and its `key`."""

    def check_run(self, run: Run) -> None:
        """Require a task with an environment."""
        found = [environment_of(task) for task in run.tasks.values()]
        if all(one is None or one.name == TOOLS for one in found):
            problem = "no task of this run has an environment: give task.environment.name"
            raise ConfigError(problem, key="reward", value="[environment]")

    def score_sample(self, sample: Sample) -> Score:
        if sample.episode is None:
            return None
        rewards = sample.episode.rewards
        if sample.episode.calls is not None and not rewards:  # task.tools
            return None
        if self.key is None:
            return sum(rewards.values())
        if self.key not in rewards:
            return Failure(f"the environment gave {', '.join(rewards) or 'nothing'}, but no {self.key!r}")
        return rewards[self.key]


@part("reward", "tools", package="reward.tools")
class Tools(BaseReward):
    """`failure` for each call that failed, plus `call` for each call; does not apply to tasks without tools.

    A failed call cannot be read, names no tool, has wrong arguments, raises, takes too long, or is one too many.
    """

    failure: float = -0.1
    """Score of each failed call."""
    call: float = 0.0
    """Score of each call, failed or not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("failure", "call"):
            require(self, name, math.isfinite(getattr(self, name)), "must be a finite number")

    def check_run(self, run: Run) -> None:
        """Require a task with tools."""
        tasks = run.tasks.values()
        if not any(getattr(task, "tools", None) or hasattr(task, TOOL_SCHEMAS) for task in tasks):
            problem = "no task of this run has tools: give task.tools=[FILE.py:NAME]"
            raise ConfigError(problem, key="reward", value="[tools]")

    def score_sample(self, sample: Sample) -> Score:
        episode = sample.episode
        if episode is None or episode.calls is None or episode.failures is None:
            return None
        return self.failure * sum(episode.failures.values()) + self.call * sum(episode.calls.values())
