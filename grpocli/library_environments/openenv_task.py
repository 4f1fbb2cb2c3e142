"""task=openenv: episodes of an OpenEnv server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import Escaped, part, require
from grpocli.environments.environment import STEP_SHARE, EnvironmentConfig
from grpocli.errors import ConfigError
from grpocli.library_environments.library_task import LibraryTask, call_in_worker
from grpocli.library_environments.openenv_environment import TOOL_ACTIONS, action_schema

if TYPE_CHECKING:
    from grpocli.environments.tools import Schema
    from grpocli.tasks.task import Example

MISSING_LIBRARY = "needs the library openenv: pip install 'openenv<0.5'"
OPENINGS = "grpocli.library_environments.openenv_environment:openings"
SERVER_TOOLS = "grpocli.library_environments.openenv_environment:server_tools"


@part("task", "openenv")
class OpenEnvTask(LibraryTask):
    """Episodes of an OpenEnv server, which gives observations and rewards; use `reward=[environment]`.

    An example is one way to reset the server, and its prompt is the first observation. Each running completion has a
    session, so the server must allow rollout.prompts_per_step x rollout.group_size of them at a time.
    """

    environment: EnvironmentConfig = EnvironmentConfig(
        name="grpocli.library_environments.openenv_environment:OpenEnv", stateful=True, turns=16, timeout=60.0
    )
    base_url: str = MISSING
    """Address of the server: `http://127.0.0.1:8000`."""
    resets: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of the server's reset, one example each; empty: `seed`, counted up from 0."""
    observation: str | None = None
    """Field of an observation that the model sees as text; null: the whole observation as JSON."""
    action: str | None = None
    """Field of an action that is the model's turn as text; null: the schema's only required field if it is a text,
    otherwise the turn must be a JSON object."""
    system_prompt: Escaped | None = None
    """System message of every prompt; null: none."""
    train_size: int = 256
    eval_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        url = self.base_url
        require(
            self, "base_url", url.startswith(("http://", "https://")), "must be an address with http:// or https://"
        )
        require(self, "system_prompt", not (self.system_prompt and self.format == "plain"), "needs task.format=chat")
        given = {"base_url": self.base_url, "observation": self.observation, "action": self.action}
        arguments = {**given, "seconds": STEP_SHARE * self.environment.timeout}
        object.__setattr__(self, "environment", replace(self.environment, arguments=arguments))

    def check_ready(self) -> None:
        super().check_ready()
        if find_spec("openenv") is None:
            raise ConfigError(MISSING_LIBRARY, key="task", value="openenv")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt`, `reset` (arguments of the server's reset) and `opening` (its first observation)."""
        resets = self.resets or [{"seed": seed} for seed in range(self.wanted)]
        chosen = [resets[i] for i in self.rows_of(split, len(resets), "task.resets", str(self.resets), "give it more")]
        texts = _openings(self.base_url, self.observation, self.environment.timeout, json.dumps(chosen))
        return [
            {"prompt": self._prompt(text), "reset": reset, "opening": text}
            for reset, text in zip(chosen, texts, strict=True)
        ]

    def tool_schemas(self) -> list[Schema]:
        """The tools of the server, if its actions are calls of tools."""
        return _tools(self.base_url, self.environment.timeout)

    def _prompt(self, text: str) -> Any:
        if self.format == "plain":
            return text
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": text}]


@lru_cache(maxsize=8)
def _openings(base_url: str, observation: str | None, timeout: float, resets: str) -> list[str]:
    """The first observation of each reset. timeout: seconds for a step."""
    wanted = json.loads(resets)
    given = [base_url, observation, STEP_SHARE * timeout, wanted]
    seconds = timeout * len(wanted)
    return call_in_worker(OPENINGS, given, seconds, (), "task.base_url", base_url, "reset its environment")


@lru_cache(maxsize=8)
def _tools(base_url: str, timeout: float) -> list[Schema]:
    import httpx

    try:
        title = action_schema(base_url).get("title")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        problem = f"no OpenEnv server answers there with its schema: {type(error).__name__}: {error}"
        raise ConfigError(problem, key="task.base_url", value=base_url) from error
    if title not in TOOL_ACTIONS:
        return []
    given = [base_url, STEP_SHARE * timeout]
    return call_in_worker(SERVER_TOOLS, given, timeout, (), "task.base_url", base_url, "list its tools")
