"""YAML files as plain values, with errors of one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

MAX_DEPTH = 100
"""Most nested lists and mappings: the C loader recurses, and a stack overflow crashes the process."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BROKEN = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""The errors that YAML loaders raise, for example for `!!timestamp abc`."""


def load(text: str) -> Any:
    """A YAML as plain values. Raises ValueError, with a message of one line, if it is broken or too deep."""
    depth = 0
    try:
        for event in yaml.parse(text, LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"lists or mappings nested more than {MAX_DEPTH} deep")
        return yaml.load(text, LOADER)
    except BROKEN as error:
        raise ValueError(reason(error)) from error


def load_mapping(text: str) -> dict[str, Any]:
    """A YAML of keys and values. Raises ValueError if it is anything else, or broken."""
    found = load(text)
    if not isinstance(found, dict):
        raise ValueError("expected a mapping")
    return found


def reason(error: BaseException) -> str:
    """A YAML error in one line: the problem and its line number, without the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).partition("; use sys.")[0].split())[:200] or type(error).__name__


def flat_values(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; a list is one value."""
    if not isinstance(node, Mapping):
        return {prefix[:-1]: node}
    found: dict[str, Any] = {}
    for name, value in node.items():
        found |= flat_values(value, f"{prefix}{name}.")
    return found
