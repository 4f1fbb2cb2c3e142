"""A cache of folders, each written atomically by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpocli.errors import RunError, config_errors
from grpocli.files import atomic_folder, clear_leftovers, lock

DEADLINE = 600.0
"""Seconds to wait for another process that makes the same folder."""


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$GRPOCLI_CACHE, else grpocli/ in the user's cache folder."""
    own = environ.get("GRPOCLI_CACHE")
    if own:
        return Path(own).expanduser()
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "grpocli"


def cached(name: str, needed: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache; `make` writes it if one of the files `needed` is missing.

    Raises ConfigError, naming GRPOCLI_CACHE, if the folder cannot be written, and RunError if another process holds it
    for longer than DEADLINE.
    """
    path = cache_dir() / name
    if _whole(path, needed):
        return path
    where: dict[str, Any] = {"key": "GRPOCLI_CACHE", "value": cache_dir(), "hint": "set it to another folder"}
    waited = f"waited {DEADLINE:.0f} s for another process that is making {path}"
    with config_errors(OSError, says="cannot store files there ({})", **where):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".lock-{path.name}").open("w") as file:
            try:
                lock(file, fcntl.LOCK_EX, DEADLINE)
            except BlockingIOError as error:
                raise RunError(f"{waited}; stop it, or set GRPOCLI_CACHE to another folder") from error
            if not _whole(path, needed):  # another process may have made it meanwhile
                clear_leftovers(path.parent, path.name)
                with atomic_folder(path, replace=True) as folder:
                    make(folder)
    return path


def _whole(path: Path, needed: tuple[str, ...]) -> bool:
    return all((path / file).is_file() for file in needed)
