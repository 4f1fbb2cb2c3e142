"""task=openenv: episodes of an OpenEnv server, one session for each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpocli.environments.background_loop import BackgroundLoop
from grpocli.environments.environment import Step
from grpocli.types import Message

if TYPE_CHECKING:
    from openenv import GenericEnvClient
    from openenv.core.client_types import StepResult

FENCE = "```"
FULL = "at capacity"
"""Part of a server's answer when it has no session left."""


class OpenEnv:
    """Sessions of a server. observation, action: names of the fields that hold a text; seconds: deadline of a step."""

    def __init__(self, base_url: str, observation: str | None, action: str | None, seconds: float) -> None:
        self.base_url, self.observation, self.action = base_url, observation, action
        self._background = BackgroundLoop(seconds)
        self._sessions: dict[str, GenericEnvClient] = {}

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return {} if self.action else action_schema(self.base_url)

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
        try:
            action = read_action(messages[-1]["content"], self.action, self._schema)
        except ValueError as error:
            return Step([{"role": "user", "content": f"error: {error}"}], 0.0, False, metadata)
        result = self._background.run(lambda: session.step(action))
        if result.done:
            self._close(metadata)
        shown: list[Message] = [{"role": "user", "content": self._text(result.observation)}]
        return Step([] if result.done else shown, result.reward or 0.0, bool(result.done), metadata)

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

        async def begin() -> StepResult[dict[str, Any]]:
            await session.connect()
            return await session.reset(**reset)

        session = GenericEnvClient(base_url=self.base_url)
        try:
            return session, self._text(self._background.run(begin).observation)
        except Exception as error:
            self._background.run(session.close)
            if FULL in str(error):
                raise ValueError(f"{error}: start it with a larger max_concurrent_envs") from error
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
    try:
        action = json.loads(bare)
    except ValueError:
        action = None
    if isinstance(action, dict):
        return action
    required = schema.get("required", [])
    if len(required) == 1 and schema.get("properties", {}).get(required[0], {}).get("type") == "string":
        return {required[0]: text}
    raise ValueError(f"an action is a JSON object with {', '.join(required) or 'the fields of the schema'}")


def action_schema(base_url: str) -> dict[str, Any]:
    """The JSON schema of a server's actions."""
    import httpx

    found: dict[str, Any] = (
        httpx.get(f"{base_url.rstrip('/')}/schema", timeout=10.0).raise_for_status().json()["action"]
    )
    return found


def openings(base_url: str, observation: str | None, seconds: float, resets: list[dict[str, Any]]) -> list[str]:
    """The first observation of each reset, for a worker process."""
    environment = OpenEnv(base_url, observation, None, seconds)
    return [environment.opening(reset) for reset in resets]
