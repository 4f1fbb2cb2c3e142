"""What installed packages add: entry points, found without importing what they name.

`grpocli.parts` are modules whose parts become choices, `grpocli.commands` are modules with a command's `main`, and
`grpocli.hooks` are functions and modules that the trainer calls where they are installed.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from grpocli.errors import config_errors


@lru_cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, by name."""
    return {plugin.name: plugin for plugin in entry_points(group=group)}


def load(plugin: EntryPoint) -> Any:
    """What an entry point names. Raises ConfigError if its package is broken."""
    problem = f"the entry point {plugin.name} = {plugin.value} cannot be loaded ({{}})"
    hint = f"install {plugin.dist.name if plugin.dist else 'its package'} again, or remove it"
    with config_errors(Exception, says=problem, why=lambda error: f"{type(error).__name__}: {error}", hint=hint):
        return plugin.load()


def hook(name: str) -> Any:
    """What an installed package offers under the name in `grpocli.hooks`; None without such a package."""
    plugin = plugins("grpocli.hooks").get(name)
    return load(plugin) if plugin else None
