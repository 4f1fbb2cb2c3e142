"""An OpenEnv server for tests whose actions are calls of tools. `python adding_server.py PORT SESSIONS`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Adding(MCPEnvironment):
    """Each right call of `add` is worth 0.5, and `stop` ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

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
        self._state = State(episode_id="adding", step_count=0)

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

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(
        Adding, CallToolAction, CallToolObservation, env_name="adding", max_concurrent_envs=int(sys.argv[2])
    )
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
