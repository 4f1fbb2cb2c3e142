"""Example values of keys for the commands that `grpocli explain KEY` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from grpocli.errors import ConfigError
from grpocli.explain.choice_files import spelled


def example_override(name: str, owner: type[Any], field: str, default: str, allowed: Sequence[str]) -> str:
    """`KEY=VALUE` with a value that the class accepts, another than the default where one is easily found.

    owner, field: the class and its field that read the key.
    """
    others = [one for one in allowed if one != default]
    others += [spelled(number) for number in _numbers(default) if _accepts(owner, field, number)]
    others += [f"'{default}'" if "$" in default else default.replace("null", "") or "VALUE"]
    return f"{name}={others[0]}"


def _numbers(default: str) -> Iterator[float]:
    try:
        value = yaml.safe_load(default) if default else None
    except yaml.YAMLError:
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        others = (value * 2, value / 2 if isinstance(value, float) else value // 2, value + 1)
        yield from (other for other in others if other != value)


def _accepts(owner: type[Any], field: str, value: Any) -> bool:
    try:
        owner(**{field: value})
    except (ConfigError, TypeError):
        return False
    return True
