"""A cache of folders, each written atomically by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grpocli.errors import ConfigError, RunError
from grpocli.files import atomic_folder

DEADLINE = 600.0
"""Seconds to wait for another process that makes the same folder."""


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$GRPOCLI_CACHE, else grpocli/ in the user's cache folder."""
    own = environ.get("GRPOCLI_CACHE")
    if own:
        return Path(own).expanduser()
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "grpocli"


def cached(name: str, needed: tuple[str, ...], make: Callable[[Path], None], deadline: float = DEADLINE) -> Path:
    """The folder `name` in the cache; `make` writes it if one of the files `needed` is missing.

    Raises ConfigError, naming GRPOCLI_CACHE, if the folder cannot be written, and RunError if another process holds it
    for longer than `deadline` seconds.
    """
    path = cache_dir() / name
    if _whole(path, needed):
        return path
    with _writable():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, deadline):
            if not _whole(path, needed):  # another process may have made it meanwhile
                _remove_leftovers(path)
                with atomic_folder(path, replace=True) as folder:
                    make(folder)
    return path


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the cache that is removed at the end of the block."""
    with _writable():
        cache_dir().mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".tmp-", dir=cache_dir())
    with made as name:
        yield Path(name)


@contextmanager
def _writable() -> Iterator[None]:
    """A block whose OSErrors become a ConfigError about the cache folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot store files there ({error.strerror or error})",
            key="GRPOCLI_CACHE",
            value=cache_dir(),
            hint="set GRPOCLI_CACHE to a folder that can be written",
        ) from error


def _whole(path: Path, needed: tuple[str, ...]) -> bool:
    return all((path / file).is_file() for file in needed)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary folders of killed processes. The caller holds the lock, so no other process writes."""
    for kind in ("tmp", "old"):
        for leftover in path.parent.glob(f".{kind}-{path.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _lock(path: Path, deadline: float) -> Iterator[None]:
    """A lock between processes, which the kernel releases when its holder ends."""
    file = path.with_name(f".lock-{path.name}")
    end = time.monotonic() + deadline
    with file.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RunError(
                        f"waited {deadline:.0f} s for another process that is making {path}; "
                        f"stop it, or set GRPOCLI_CACHE to another folder"
                    ) from None
                time.sleep(0.1)
        yield
