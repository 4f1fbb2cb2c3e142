"""YAML from untrusted files, checked for size and depth before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Maximum number of values with expanded aliases. Nine lines of aliases can expand to a billion values."""
MAX_DEPTH = 100
"""Maximum depth of nested lists and mappings. The C loader recurses, and a stack overflow crashes the process."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BROKEN = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""The errors that YAML loaders raise, for example for `!!timestamp abc`."""


def load(text: str) -> Any:
    """A YAML as plain values. Raises ValueError, with a message of one line, if it is broken or too large."""
    check(text)
    try:
        return yaml.load(text, LOADER)
    except BROKEN as error:
        raise ValueError(reason(error)) from error


def check(text: str) -> None:
    """Raise ValueError, with a message of one line, if a YAML is broken, too deep or too large."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    size = 0
    try:
        for event in yaml.parse(text, LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, size))
                size = 1
                if len(open_nodes) > MAX_DEPTH:
                    raise ValueError(f"lists or mappings nested more than {MAX_DEPTH} deep")
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor:
                    sizes[anchor] = size
                size += before
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor in [anchor for anchor, _ in open_nodes]:
                    raise ValueError(f"*{event.anchor} is inside its own anchor")
                size += sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.ScalarEvent):
                size += 1
            if size > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES:,} values with expanded aliases")
    except yaml.YAMLError as error:
        raise ValueError(reason(error)) from error


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
