"""Which choice of a config group a live part is, and which choices there are."""

from __future__ import annotations

import importlib
from typing import Any

from grpocli.config.parts import stored


def choice_of(group: str, part: object) -> str:
    """The name a part's class is registered under, or the class's own where it comes from a YAML of the user's."""
    target = f"{type(part).__module__}.{type(part).__qualname__}"
    names = {made: name for name, made in _targets(group).items()}
    return names.get(target, target)


def registered(group: str) -> dict[str, type[Any]]:
    """{choice: class} of a config group of parts."""
    return {name: _class(target) for name, target in _targets(group).items()}


def _targets(group: str) -> dict[str, str]:
    return {name: str(node._target_) for name, node in stored(group).items()}


def _class(target: str) -> type[Any]:
    module, _, name = target.rpartition(".")
    made: type[Any] = getattr(importlib.import_module(module), name)
    return made
