"""`task=[gsm8k,arithmetic]`: several choices of a group whose keys would otherwise fall on each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpocli.config.user_parts import is_spec, name_of
from grpocli.errors import ConfigError

SEVERAL = re.compile(r"task=\[(.*)\]\s*")


def spread(overrides: Sequence[str]) -> list[str]:
    """The overrides with such a list as Hydra takes it: `task=mixture`, and each task below its own name.

    Raises ConfigError for an empty list or a task that is named twice.
    """
    return [given for override in overrides for given in _spread(override)]


def _spread(override: str) -> list[str]:
    found = SEVERAL.fullmatch(override)
    if not found:
        return [override]
    choices = [choice.strip().strip("'\"") for choice in found[1].split(",") if choice.strip()]
    names = [_name(choice) for choice in choices]
    if not names:
        raise ConfigError("task=[]: choose at least one task")
    if twice := [choice for i, choice in enumerate(choices) if names[i] in names[:i]]:
        problem = f"names {_name(twice[0])} twice; leave one out and give it a name: +task@task.NAME={twice[0]}"
        raise ConfigError(f"{override}: {problem}")
    return ["task=mixture", *(f"+task@task.{name}={choice}" for name, choice in zip(names, choices, strict=True))]


def _name(choice: str) -> str:
    return name_of(choice) if is_spec(choice) else choice
