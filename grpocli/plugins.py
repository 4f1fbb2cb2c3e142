"""What installed packages add: entry points, found without importing what they name.

`grpocli.parts` are modules whose parts become choices, `grpocli.commands` are modules with a command's `main`, and
`grpocli.hooks` are what the trainer asks for a word if it is there.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@lru_cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, by name."""
    return {plugin.name: plugin for plugin in entry_points(group=group)}


def hook(name: str) -> Any:
    """What an installed package offers under the name in `grpocli.hooks`; None without such a package."""
    plugin = plugins("grpocli.hooks").get(name)
    return plugin.load() if plugin else None
