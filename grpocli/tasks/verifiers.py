"""task=verifiers: the tasks, rewards and turns of an environment of the library verifiers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import one_of, part, require
from grpocli.environments.environment import STEP_SHARE, EnvironmentConfig
from grpocli.errors import ConfigError
from grpocli.tasks.library_worker import call_in_worker, number_held_out
from grpocli.tasks.task import BaseTask
from grpocli.types import Message, Text

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

MISSING_LIBRARY = "needs the library verifiers: pip install 'verifiers<0.5'"
LOADER = "grpocli.environments.verifiers:load_rows"


@part("task", "verifiers")
class VerifiersTask(BaseTask):
    """Tasks of an environment of verifiers, which plays and scores its episodes; use `reward=[environment]`."""

    environment: EnvironmentConfig = EnvironmentConfig(
        name="grpocli.environments.verifiers:Verifiers", stateful=True, turns=32, timeout=60.0
    )
    env: str = MISSING
    """An installed environment, or the path of its folder or .py file: the module that exports a `Taskset`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the taskset's config: `task.config.split=train`."""
    paired_env: str = ""
    """Name of an environment of verifiers that plays the taskset; empty: the taskset's own."""
    format: str = "chat"
    """`chat`: messages for the chat template; `plain`: the text of a single user message."""
    train_size: int = 1000
    """Most tasks to train on: those after the tasks to evaluate on."""
    eval_size: int = 100
    """Most tasks to evaluate on, at most a fifth of all: the first ones."""
    load_timeout: float = 300.0
    """Seconds for loading the tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "env", self.env not in ("", MISSING), "name an environment: task.env=NAME, or its folder")
        one_of(self, "format", ("chat", "plain"))
        require(self, "train_size", self.train_size >= 1, "must be at least 1")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")
        require(self, "load_timeout", self.load_timeout > 0, "must be above 0 seconds")
        seconds = STEP_SHARE * self.environment.timeout
        given = {"taskset": self.env, "config": self.config, "env": self.paired_env, "seconds": seconds}
        object.__setattr__(self, "environment", replace(self.environment, arguments=given))

    def check_ready(self) -> None:
        super().check_ready()
        if find_spec("verifiers") is None:
            raise ConfigError(MISSING_LIBRARY, key="task", value="verifiers")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt`, the task's own columns, and `index` and `key`, which name the task."""
        rows = _rows(
            self.env,
            json.dumps(self.config, sort_keys=True),
            self.paired_env,
            self.train_size + self.eval_size,
            self.load_timeout,
            tuple(self.environment.env),
        )
        held_out = number_held_out(len(rows), self.eval_size)
        chosen = rows[:held_out] if split == "eval" else rows[held_out:]
        if not chosen:
            problem = f"has {len(rows)} tasks, too few for {split}"
            raise ConfigError(problem, key="task.env", value=self.env, hint="give it more tasks by task.config")
        return [{**row, "prompt": self._prompt(row["prompt"])} for row in chosen]

    def _prompt(self, messages: list[Message]) -> Text:
        if self.format == "chat":
            return messages
        if len(messages) != 1 or messages[0]["role"] != "user":
            problem = "is for a prompt of one user message, but this environment's have more"
            raise ConfigError(problem, key="task.format", value=self.format, hint="use task.format=chat")
        return str(messages[0]["content"])


@lru_cache(maxsize=8)
def _rows(
    env: str, config: str, paired: str, n: int, timeout: float, variables: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The first n tasks."""
    given = [env, json.loads(config), paired, STEP_SHARE * timeout, n]
    return call_in_worker(LOADER, given, timeout, variables, "task.env", env, "load it")
