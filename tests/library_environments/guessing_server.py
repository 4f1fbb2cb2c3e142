"""An OpenEnv server for tests: guess a digit that the seed chooses. `python guessing_server.py PORT SESSIONS`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    message: str


class GuessObservation(Observation):
    text: str = ""


class Guess(Environment[GuessAction, GuessObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State(episode_id="guess", step_count=0)
        self.digit = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> GuessObservation:
        self.digit = random.Random(seed).randrange(10)
        return GuessObservation(text=f"guess {seed}", reward=0.0)

    def step(self, action: GuessAction, timeout_s: float | None = None, **given: Any) -> GuessObservation:
        self._state.step_count += 1
        right = action.message.strip() == str(self.digit)
        hint = "more" if action.message.strip().isdigit() and int(action.message) < self.digit else "less"
        return GuessObservation(text="yes" if right else hint, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Guess, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
