"""Files that are whole or absent: written beside, fsynced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old content or the new, whatever happens in between."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the block succeeds, and is removed when it fails.

    replace: whether a `path` that exists gives way; otherwise FileExistsError.
    """
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists")
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync_file(file)
        for folder in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            sync_folder(folder)
        _swap(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(path.parent)


def _swap(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
        return
    old = path.with_name(f".old-{path.name}-{os.getpid()}")
    path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old)


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
