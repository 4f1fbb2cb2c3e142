"""YAML from untrusted files: checked for size and depth before it is loaded."""

from __future__ import annotations

from typing import Any

import yaml

MAX_VALUES = 100_000
"""Values, with aliases expanded: nine lines of aliases can expand to a billion."""
MAX_DEPTH = 100
"""Nested lists and mappings: the C loader recurses, and crashes the process when its stack is full."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BROKEN = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What YAML's loaders raise, for `!!timestamp abc` among others."""


def load(text: str) -> Any:
    """A YAML as plain values. Raises ValueError, in one line, for what cannot be read or is too large."""
    check(text)
    try:
        return yaml.load(text, LOADER)
    except BROKEN as error:
        raise ValueError(reason(error)) from error


def check(text: str) -> None:
    """Raise ValueError, in one line, where a YAML is broken, too deep, or larger than it looks."""
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
                    raise ValueError(f"*{event.anchor} stands inside of what it stands for")
                size += sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.ScalarEvent):
                size += 1
            if size > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES:,} values, with what its aliases stand for")
    except yaml.YAMLError as error:
        raise ValueError(reason(error)) from error


def reason(error: BaseException) -> str:
    """An error of YAML's in one line: the problem and its line, without the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).partition("; use sys.")[0].split())[:200] or type(error).__name__
