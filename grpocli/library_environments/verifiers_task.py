"""task=verifiers: the tasks, rewards and turns of an environment of the library verifiers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import UserCode, part, require
from grpocli.config.user_code import no_such_file
from grpocli.environments.environment import STEP_SHARE, EnvironmentConfig
from grpocli.errors import ConfigError
from grpocli.library_environments.library_task import LibraryTask, call_in_worker
from grpocli.types import Message, Text

if TYPE_CHECKING:
    from grpocli.environments.tools import Schema
    from grpocli.tasks.task import Example

MISSING_LIBRARY = "needs the library verifiers: pip install 'verifiers<0.5'"
LOADER = "grpocli.library_environments.verifiers_environment:load_tasks"


@part("task", "verifiers")
class VerifiersTask(LibraryTask):
    """Tasks of an environment of verifiers, which plays and scores its episodes; use `reward=[environment]`."""

    environment: EnvironmentConfig = EnvironmentConfig(
        name="grpocli.library_environments.verifiers_environment:Verifiers", stateful=True, turns=32, timeout=60.0
    )
    env: UserCode = MISSING
    """An installed environment, or the path of its folder or .py file: the module that exports a `Taskset`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the taskset's config: `task.config.split=train`."""
    paired_env: UserCode = ""
    """Name of an environment of verifiers that plays the taskset; empty: the taskset's own."""
    load_timeout: float = 300.0
    """Seconds for loading the tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "env", self.env not in ("", MISSING), "name an environment: task.env=NAME, or its folder")
        require(self, "load_timeout", 0 < self.load_timeout < math.inf, "must be above 0 seconds and finite")
        seconds = STEP_SHARE * self.environment.timeout
        given = {"taskset": self.env, "config": self.config, "env": self.paired_env, "seconds": seconds}
        object.__setattr__(self, "environment", replace(self.environment, arguments=given))

    def check_ready(self) -> None:
        super().check_ready()
        if find_spec("verifiers") is None:
            raise ConfigError(MISSING_LIBRARY, key="task", value="verifiers")
        place = Path(self.env).expanduser()
        is_path = place.suffix == ".py" or self.env.startswith((".", "/", "~"))  # OWNER/NAME is a package
        if is_path and not place.exists():
            raise no_such_file(place, "task.env")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt`, the task's own columns, and `index` and `key`, which name the task."""
        rows, _ = self._loaded()
        chosen = self.rows_of(split, len(rows), "task.env", self.env, "give it more tasks by task.config")
        return [{**rows[i], "prompt": self._prompt(rows[i]["prompt"])} for i in chosen]

    def tool_schemas(self) -> list[Schema]:
        """The tools that the tasks give to the model."""
        _, schemas = self._loaded()
        return schemas

    def _loaded(self) -> tuple[list[dict[str, Any]], list[Schema]]:
        config, variables = json.dumps(self.config, sort_keys=True), tuple(self.environment.env)
        return _load(self.env, config, self.paired_env, self.wanted, self.load_timeout, variables)

    def _prompt(self, messages: list[Message]) -> Text:
        if self.format == "chat":
            return messages
        if len(messages) != 1 or messages[0]["role"] != "user":
            problem = "is for a prompt of one user message, but this environment's have more"
            raise ConfigError(problem, key="task.format", value=self.format, hint="use task.format=chat")
        return str(messages[0]["content"])


@lru_cache(maxsize=8)
def _load(
    env: str, config: str, paired: str, n: int, timeout: float, variables: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[Schema]]:
    """The first n tasks, and their tools."""
    given = [env, json.loads(config), paired, STEP_SHARE * timeout, n]
    rows, schemas = call_in_worker(LOADER, given, timeout, variables, "task.env", env, "load it")
    return rows, schemas
