"""YAML files as plain values, with errors of one line, and the keys and values of a config."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import yaml

BROKEN = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""The errors that YAML loaders raise, for example for `!!timestamp abc`."""
TARGET = "_target_"
"""The key that names the class of a mapping's other keys."""
Leaf = tuple[str, Any]
"""A dotted key, and its value."""


class LOADER(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads what OmegaConf's loader reads, in a quarter of its time: `1e-6` is a number, and a key stands once."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as its base declares it
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":timestamp", ":float"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {twice[0]}", node.start_mark)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


LOADER.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\d[\d_]*\.[\d_]*(e[-+]?\d+)?|\d[\d_]*e[-+]?\d+|\.\d[\d_]*(e[-+]\d+)?|\.inf)$|\.nan$", re.IGNORECASE
    ),
    list("-+0123456789."),
)


def load(text: str) -> Any:
    """A YAML as plain values. Raises ValueError, with a message of one line, if it is broken."""
    try:
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


def nodes(node: Any, key: str = "", lists: bool = True) -> Iterator[Leaf]:
    """The keys and values of a config, its sections included; without `lists` a list is one value.

    Otherwise what is in a list has the key of the list.
    """
    yield key, node
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from nodes(value, f"{key}.{name}".lstrip("."), lists)
    elif lists and isinstance(node, list | tuple):
        for value in node:
            yield from nodes(value, key)


def leaves(node: Any, key: str = "", lists: bool = True) -> Iterator[Leaf]:
    """The values of `nodes` that hold no others."""
    holding = (Mapping, list, tuple) if lists else (Mapping,)
    return ((key, value) for key, value in nodes(node, key, lists) if not isinstance(value, holding))


def flat(node: Any, key: str = "") -> dict[str, Any]:
    """{"a": {"b": [1]}} as {"a.b": [1]}, without `_target_`."""
    return {key: value for key, value in leaves(node, key, lists=False) if key.rpartition(".")[2] != TARGET}
