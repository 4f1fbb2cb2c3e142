"""The functions that worker processes run for an environment. Arguments and results are JSON values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from grpocli.config.user_code import load, raised
from grpocli.environments.environment import ROLES, Step
from grpocli.environments.tools import encodable, run_tool, schemas
from grpocli.types import Message

KEY = "task.environment.name"
LONGEST = 200_000
"""Most characters of an observation."""


def reset(name: str, arguments: str, metadata: dict[str, Any]) -> list[Any]:
    """Start an episode; return its state as [metadata]. arguments: keyword arguments of the class, as JSON."""
    state = _call_user(_environment(name, arguments).reset, metadata)
    return [_state(metadata if state is None else state)]


def step(name: str, arguments: str, messages: list[Message], metadata: dict[str, Any]) -> list[Any]:
    """Do one turn; return [observation, rewards by name, done, metadata].

    Raises ValueError if the user's `step` returns something else.
    """
    result = _call_user(_environment(name, arguments).step, messages, metadata)
    if not isinstance(result, tuple | list) or len(result) != len(Step._fields):
        raise ValueError(f"step returned {result!r}, not (observation, reward, done, metadata)")
    observation, reward, done, state = result
    return [_messages(observation), _rewards(reward), bool(done), _state(state)]


def finish(name: str, arguments: str, messages: list[Message], metadata: dict[str, Any]) -> list[Any]:
    """Tell the environment, if it has `finish`, that a limit ended the episode; return its [rewards by name]."""
    function = getattr(_environment(name, arguments), "finish", None)
    return [_rewards(_call_user(function, messages, metadata), "finish") if function else {}]


METHODS: dict[str, Callable[..., list[Any]]] = {
    "reset": reset,
    "step": step,
    "finish": finish,
    "schemas": schemas,
    "tool": run_tool,
}


def call(kind: str, *given: Any) -> list[Any]:
    """Call one of METHODS, so that one pool serves all."""
    return METHODS[kind](*given)


@lru_cache(maxsize=64)
def _environment(name: str, arguments: str) -> Any:
    return _call_user(load(name, KEY), **json.loads(arguments))


def _call_user(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return function(*given, **named)
    except (Exception, SystemExit) as error:
        raise RuntimeError(raised(error)) from error


def _messages(observation: Any) -> list[Message]:
    """An observation as messages without lone surrogates. Raises ValueError for one that is none."""
    messages = [observation] if isinstance(observation, dict) else observation
    if not isinstance(messages, list | tuple):
        raise ValueError(f"step observed {messages!r}, expected a list of messages")
    for message in messages:
        fits = isinstance(message, dict) and isinstance(message.get("content"), str) and message.get("role") in ROLES
        if not fits:
            roles = ", ".join(ROLES)
            raise ValueError(f"step observed {message!r}; a message has a text `content`, and a `role` of {roles}")
    if (length := sum(len(message["content"]) for message in messages)) > LONGEST:
        raise ValueError(f"step observed {length:,} characters; at most {LONGEST:,} are allowed")
    return [{**message, "content": encodable(message["content"])} for message in messages]


def _rewards(reward: Any, method: str = "step") -> dict[str, float]:
    named = reward if isinstance(reward, Mapping) else {"reward": 0.0 if reward is None else reward}
    found = {str(name): float(value) for name, value in named.items()}
    if not all(math.isfinite(value) for value in found.values()):
        raise ValueError(f"{method} rewarded {reward!r}, expected finite numbers")
    return found


def _state(metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata is {metadata!r}, not a dict")
    return metadata
