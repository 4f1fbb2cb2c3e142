"""The choices of config groups by name, and the keys of a config."""

from __future__ import annotations

import importlib
from typing import Any

from grpocli.config.parts import stored
from grpocli.config.user_code import short
from grpocli.config.user_parts import is_spec, target_of


def choice_of(group: str, part: object) -> str:
    """The name that the class of `part` is registered under; for a user's class FILE.py:CLASS or its import path."""
    target = target_of(type(part))
    names = {made: name for name, made in _targets(group).items()}
    return short(target) if is_spec(target) else names.get(target, target)


def registered(group: str) -> dict[str, type[Any]]:
    """{choice: class} for a config group of parts."""
    return {name: _class(target) for name, target in _targets(group).items()}


def flat_keys(node: Any, prefix: str = "") -> list[str]:
    """`a`, `a.b`, ... of nested mappings, without `_target_`."""
    if not isinstance(node, dict):
        return []
    keys: list[str] = []
    for name, value in node.items():
        if name != "_target_":
            keys += [f"{prefix}{name}", *flat_keys(value, f"{prefix}{name}.")]
    return keys


def _targets(group: str) -> dict[str, str]:
    return {name: str(node._target_) for name, node in stored(group).items()}


def _class(target: str) -> type[Any]:
    module, _, name = target.rpartition(".")
    made: type[Any] = getattr(importlib.import_module(module), name)
    return made
