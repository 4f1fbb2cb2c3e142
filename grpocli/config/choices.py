"""The choices of config groups by name, and the keys of a config."""

from __future__ import annotations

from typing import Any

from grpocli.config.parts import CLASSES, target_of
from grpocli.config.user_code import short
from grpocli.config.user_parts import is_spec


def choice_of(group: str, part: object) -> str:
    """The choice whose class a part is, FILE.py:CLASS of a user's, or the import path of a class without a name."""
    target = target_of(type(part))
    return short(target) if is_spec(target) else target.removeprefix(f"{group}/")


def registered(group: str) -> dict[str, type[Any]]:
    """{choice: class} of a config group, without those of other packages."""
    ours = {name: cls for name, cls in sorted(CLASSES.items()) if cls.__module__.startswith("grpocli.")}
    return {name.removeprefix(f"{group}/"): cls for name, cls in ours.items() if name.startswith(f"{group}/")}


def flat_keys(node: Any, prefix: str = "") -> list[str]:
    """`a`, `a.b`, ... of nested mappings, without `_target_`."""
    if not isinstance(node, dict):
        return []
    keys: list[str] = []
    for name, value in node.items():
        if name != "_target_":
            keys += [f"{prefix}{name}", *flat_keys(value, f"{prefix}{name}.")]
    return keys
