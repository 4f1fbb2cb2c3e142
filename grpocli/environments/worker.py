"""What a worker process computes for an environment. Everything that comes and goes is JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from grpocli.config.user_code import load
from grpocli.environments.environment import ROLES
from grpocli.types import Message
from grpocli.user_frames import raised

KEY = "task.environment.name"
LONGEST = 200_000
"""Characters of an observation."""


def reset(name: str, arguments: str, metadata: dict[str, Any]) -> list[Any]:
    """[metadata]. arguments: JSON."""
    found = _asked(_made(name, arguments).reset, metadata)
    return [_json(metadata if found is None else found)]


def step(name: str, arguments: str, messages: list[Message], metadata: dict[str, Any]) -> list[Any]:
    """[observation, rewards by name, done, metadata]. Raises ValueError for an answer of another shape."""
    answer = _asked(_made(name, arguments).step, messages, metadata)
    try:
        observation, reward, done, state = answer
    except (TypeError, ValueError):
        raise ValueError(f"step returned {answer!r}, not (observation, reward, done, metadata)") from None
    return [_messages(observation), _rewards(reward), bool(done), _json(state)]


def call(kind: str, *given: Any) -> list[Any]:
    """The two above, for one pool."""
    return reset(*given) if kind == "reset" else step(*given)


@lru_cache(maxsize=64)
def _made(name: str, arguments: str) -> Any:
    return _asked(load(name, KEY), **json.loads(arguments))


def _asked(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return function(*given, **named)
    except (Exception, SystemExit) as error:
        raise RuntimeError(raised(error)) from error


def _messages(observation: Any) -> list[Message]:
    if isinstance(observation, dict):
        observation = [observation]
    if not isinstance(observation, list | tuple):
        raise ValueError(f"step observed {observation!r}, which is no list of messages")
    for message in observation:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"step observed {message!r}; a message is a dict with `role` and `content`")
        if message.get("role") not in ROLES:
            raise ValueError(f"step observed a message of the role {message.get('role')!r}; take {', '.join(ROLES)}")
    if (length := sum(len(message["content"]) for message in observation)) > LONGEST:
        raise ValueError(f"step observed {length:,} characters; {LONGEST:,} are the most that are tokenised")
    try:
        json.dumps(observation)
    except (TypeError, ValueError) as error:
        raise ValueError(f"step observed what is not made of JSON values: {error}") from error
    return list(observation)


def _rewards(reward: Any) -> dict[str, float]:
    named = reward if isinstance(reward, Mapping) else {"reward": 0.0 if reward is None else reward}
    found = {str(name): float(value) for name, value in named.items()}
    if not all(math.isfinite(value) for value in found.values()):
        raise ValueError(f"step rewarded {reward!r}, which is no finite number")
    return found


def _json(metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata is {metadata!r}, not a dict")
    try:
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its metadata is not made of JSON values: {error}") from error
    return metadata
