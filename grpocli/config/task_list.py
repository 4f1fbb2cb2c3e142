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
    names = [name_of(choice) if is_spec(choice) else choice for choice in choices]
    if not names:
        raise ConfigError("task=[]: choose at least one task")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problem = f"names {twice[0]} twice; give one of them a name of its own: +task@task.NAME={twice[0]}"
        raise ConfigError(f"{override}: {problem}")
    return ["task=mixture", *(f"+task@task.{name}={choice}" for name, choice in zip(names, choices, strict=True))]
