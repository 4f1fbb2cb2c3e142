"""OpenEnv servers for tests. `python openenv_server.py guess|add PORT SESSIONS`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    message: str


class GuessObservation(Observation):
    text: str = ""


class Guess(Environment[GuessAction, GuessObservation, State]):
    """Guess a digit that the seed chooses."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State(episode_id="guess", step_count=0)
    digit = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> GuessObservation:
        self.digit = random.Random(seed).randrange(10)
        return GuessObservation(text=f"guess {seed}", reward=0.0)

    def step(self, action: GuessAction, timeout_s: float | None = None, **given: Any) -> GuessObservation:
        right = action.message.strip() == str(self.digit)
        hint = "more" if action.message.strip().isdigit() and int(action.message) < self.digit else "less"
        return GuessObservation(text="yes" if right else hint, done=right, reward=1.0 if right else -0.25)


class Adding(MCPEnvironment):
    """Its actions are calls of tools: each right call of `add` is worth 0.5, and `stop` ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State(episode_id="adding", step_count=0)

    def __init__(self) -> None:
        server = FastMCP("adding")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def stop(why: str) -> str:
            """End the episode."""
            return f"stopped: {why}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Observation:
        return CallToolObservation(tool_name="", result=f"add {seed}", done=False, reward=0.0)

    async def step_async(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        observation = await super().step_async(action, timeout_s, **given)
        if isinstance(action, CallToolAction):
            observation.reward = 0.5 if action.tool_name == "add" and not observation.error else 0.0
            observation.done = action.tool_name == "stop"
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        raise ValueError("only calls of tools are actions")


if __name__ == "__main__":
    kind, port, sessions = sys.argv[1:]
    parts = {"guess": (Guess, GuessAction, GuessObservation), "add": (Adding, CallToolAction, CallToolObservation)}
    app = create_app(*parts[kind], env_name=kind, max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
