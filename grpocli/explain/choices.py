"""Which choice of a config group a live part is, and which choices there are."""

from __future__ import annotations

import importlib
from typing import Any

from grpocli.config.parts import stored
from grpocli.config.user_code import short
from grpocli.config.user_parts import is_spec, target_of


def choice_of(group: str, part: object) -> str:
    """The name a part's class is registered under, FILE.py:CLASS of a user's, or where a YAML of theirs has it from."""
    target = target_of(type(part))
    names = {made: name for name, made in _targets(group).items()}
    return short(target) if is_spec(target) else names.get(target, target)


def registered(group: str) -> dict[str, type[Any]]:
    """{choice: class} of a config group of parts."""
    return {name: _class(target) for name, target in _targets(group).items()}


def _targets(group: str) -> dict[str, str]:
    return {name: str(node._target_) for name, node in stored(group).items()}


def _class(target: str) -> type[Any]:
    module, _, name = target.rpartition(".")
    made: type[Any] = getattr(importlib.import_module(module), name)
    return made
