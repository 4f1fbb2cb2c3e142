"""task=openenv: episodes of an OpenEnv server, one session for each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import Escaped, part, require
from grpocli.environments.environment import STEP_SHARE, EnvironmentConfig, Step
from grpocli.environments.tools import Schema, answer_to, call_in_worker, calls_in, name_of, refusal
from grpocli.http import fetch, is_server_url
from grpocli.library_environments.library_task import BackgroundLoop, LibraryTask
from grpocli.tasks.task import Example
from grpocli.types import Message

if TYPE_CHECKING:
    from openenv import GenericEnvClient
    from openenv.core.client_types import StepResult

HERE = "grpocli.library_environments.openenv"
FENCE = "```"
FULL = "at capacity"
"""Part of a server's answer when it has no session left."""
INVALID = "VALIDATION_ERROR"
"""Part of a server's answer to an action that does not fit its schema."""
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Names of the schemas of actions of servers whose actions are calls of tools."""


@part("task", "openenv")
class OpenEnvTask(LibraryTask):
    """Episodes of an OpenEnv server, which gives observations and rewards; use `reward=[environment]`.

    An example is one way to reset the server, and its prompt is the first observation. Each running completion has a
    session, so the server must allow rollout.prompts_per_step x rollout.group_size of them at a time.
    """

    library, needs = "openenv", "openenv<0.5"
    environment: EnvironmentConfig = EnvironmentConfig(name=f"{HERE}:OpenEnv", stateful=True, turns=16, timeout=60.0)
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
        require(self, "base_url", is_server_url(self.base_url), "must be an address with http:// or https://")
        require(self, "system_prompt", not (self.system_prompt and self.format == "plain"), "needs task.format=chat")
        given = {"base_url": self.base_url, "observation": self.observation, "action": self.action}
        arguments = {**given, "seconds": STEP_SHARE * self.environment.timeout}
        own = replace(self.environment, name=f"{HERE}:OpenEnv", arguments=arguments)
        object.__setattr__(self, "environment", own)

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt`, `reset` (arguments of the server's reset) and `opening` (its first observation)."""
        resets = self.resets or [{"seed": seed} for seed in range(self.wanted)]
        chosen = [resets[i] for i in self.rows_of(split, len(resets), "task.resets", str(self.resets), "give it more")]
        texts, _ = _load(self.base_url, self.observation, self.environment.timeout, json.dumps(chosen))
        return [
            {"prompt": self._prompt(text), "reset": reset, "opening": text}
            for reset, text in zip(chosen, texts, strict=True)
        ]

    def tool_schemas(self) -> list[Schema]:
        """The tools of the server, if its actions are calls of tools."""
        _, tools = _load(self.base_url, self.observation, self.environment.timeout, "[]")
        return tools

    def _prompt(self, text: str) -> Any:
        if self.format == "plain":
            return text
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": text}]


@lru_cache(maxsize=8)
def _load(base_url: str, observation: str | None, timeout: float, resets: str) -> tuple[list[str], list[Schema]]:
    """The first observation of each reset, and the tools of the server. timeout: seconds for a step."""
    wanted = json.loads(resets)
    given, seconds = [base_url, observation, STEP_SHARE * timeout, wanted], timeout * (1 + len(wanted))
    texts, tools = call_in_worker(f"{HERE}:load", given, seconds, (), "task.base_url", base_url)
    return texts, tools


class OpenEnv:
    """Sessions of a server.

    observation, action: names of the fields that hold a text; seconds: deadline of a step; tool_schemas: the tools that
    the prompts show. With tools, the actions are calls of them.
    """

    def __init__(
        self,
        base_url: str,
        observation: str | None,
        action: str | None,
        seconds: float,
        tool_schemas: Sequence[Schema] = (),
    ) -> None:
        self.base_url, self.observation, self.action = base_url, observation, action
        self._tools = list(map(name_of, tool_schemas))
        self._background = BackgroundLoop(seconds)
        self._sessions: dict[str, GenericEnvClient] = {}

    @cached_property
    def _schema(self) -> dict[str, Any]:
        """The JSON schema of the server's actions; empty if it is not needed."""
        if self.action:
            return {}
        answer = fetch(f"{self.base_url.rstrip('/')}/schema", self._background.seconds).raise_for_status()
        found: dict[str, Any] = answer.json()["action"]
        return found

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Open a session and reset it with the example's `reset`. Raises ValueError for another opening."""
        name = secrets.token_urlsafe(8)
        session, text = self._open(metadata["reset"])
        self._sessions[name] = session
        if text != metadata["opening"]:
            self._close({"session": name})
            raise ValueError(f"two resets with {metadata['reset']} have different first observations; give a seed")
        return {"session": name}

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        """Send the model's turn as an action. An unreadable action is answered, and has no reward."""
        session = self._sessions.get(metadata["session"])
        if session is None:
            raise ValueError("its worker process ended, and with it the session")
        with ExitStack() as over:
            over.callback(self._close, metadata)
            step = (self._call_tools if self._tools else self._act)(session, messages[-1], metadata)
            if not step.done:
                over.pop_all()
        return step

    def _act(self, session: GenericEnvClient, turn: Message, metadata: dict[str, Any]) -> Step:
        """Send a turn as an action."""
        try:
            action = read_action(turn["content"], self.action, self._schema)
            result = self._background.run(lambda: session.step(action))
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and INVALID not in str(error):
                raise
            said = "the action does not fit the server's schema" if isinstance(error, RuntimeError) else error
            return Step([{"role": "user", "content": f"error: {said}"}], 0.0, False, metadata)
        shown: list[Message] = [{"role": "user", "content": self._text(result.observation)}]
        return Step([] if result.done else shown, result.reward or 0.0, bool(result.done), metadata)

    def _call_tools(self, session: GenericEnvClient, turn: Message, metadata: dict[str, Any]) -> Step:
        """Run the calls of a turn, one action for each. A turn without a call ends the episode."""
        answers: list[Message] = []
        total, done = 0.0, not calls_in(turn)
        for call in calls_in(turn):
            if done:
                break
            content = refusal(call, self._tools)
            failed = bool(content)
            if not failed:
                action = {"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]}
                result = self._background.run(partial(session.step, action))
                content, failed = read_result(result.observation)
                total, done = total + (result.reward or 0.0), bool(result.done)
            answers.append(answer_to(call, self._tools, content, failed))
        return Step(answers, total, done, metadata)

    def tools(self) -> list[Schema]:
        """The tools of the server, if its actions are calls of tools."""
        from openenv import GenericEnvClient

        async def ask() -> StepResult[dict[str, Any]]:
            async with GenericEnvClient(base_url=self.base_url) as session:
                return await session.step({"type": "list_tools"})

        if self._schema.get("title") not in TOOL_ACTIONS:
            return []
        functions = (
            {"name": one["name"], "description": one["description"], "parameters": one["input_schema"]}
            for one in self._background.run(ask).observation.get("tools", [])
        )
        return [{"type": "function", "function": function} for function in functions]

    def finish(self, messages: list[Message], metadata: dict[str, Any]) -> None:
        """Close the session of an episode that a limit ended."""
        self._close(metadata)

    def opening(self, reset: dict[str, Any]) -> str:
        """The first observation after a reset with these arguments."""
        session, text = self._open(reset)
        self._background.run(session.close)
        return text

    def _open(self, reset: dict[str, Any]) -> tuple[GenericEnvClient, str]:
        from openenv import GenericEnvClient
        from websockets.exceptions import ConnectionClosedOK

        async def begin() -> StepResult[dict[str, Any]]:
            await session.connect()
            return await session.reset(**reset)

        session = GenericEnvClient(base_url=self.base_url)
        try:
            return session, self._text(self._background.run(begin).observation)
        except Exception as error:
            self._background.run(session.close)
            if FULL in str(error) or isinstance(error, ConnectionClosedOK):  # it may close before its reason is read
                problem = f"the server has no session left ({error})"
                raise ValueError(f"{problem}: start it with a larger max_concurrent_envs") from error
            raise

    def _close(self, metadata: dict[str, Any]) -> None:
        if session := self._sessions.pop(metadata["session"], None):
            self._background.run(session.close)

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The text of an observation: its field `observation`, or all of it as JSON."""
        if self.observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if self.observation not in observation:
            raise ValueError(f"the observation has the fields {', '.join(observation)}, but no {self.observation!r}")
        return str(observation[self.observation])


def read_action(text: str, field: str | None, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action that a turn of the model says: its text as `field`, or a JSON object, which may be fenced.

    Raises ValueError if the text is no JSON object and the schema does not have exactly one required field, a text.
    """
    if field is not None:
        return {field: text}
    bare = text.strip()
    if bare.startswith(FENCE) and bare.endswith(FENCE):
        bare = "\n".join(bare.splitlines()[1:-1])
    with suppress(ValueError):
        if isinstance(action := json.loads(bare), dict):
            return action
    required = schema.get("required", [])
    if len(required) == 1 and schema.get("properties", {}).get(required[0], {}).get("type") == "string":
        return {required[0]: text}
    raise ValueError(f"an action is a JSON object with {', '.join(required) or 'the fields of the schema'}")


def read_result(observation: Mapping[str, Any]) -> tuple[str, bool]:
    """The text of a tool's result, and whether the call failed."""
    if error := observation.get("error"):
        return f"error: {error['message']}", True
    result = observation.get("result")
    if not isinstance(result, dict) or "content" not in result:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), False
    texts = [part["text"] for part in result["content"] if part.get("type") == "text"]
    return "\n".join(texts), bool(result.get("is_error"))


def load(base_url: str, observation: str | None, seconds: float, resets: list[dict[str, Any]]) -> list[Any]:
    """[the first observation of each reset, the tools of the server], for a worker process."""
    environment = OpenEnv(base_url, observation, None, seconds)
    return [[environment.opening(reset) for reset in resets], environment.tools()]
