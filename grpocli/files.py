"""Files and folders that are whole or absent: written under a temporary name, fsynced, renamed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from grpocli.text import masked

FULL = (errno.ENOSPC, errno.EDQUOT)
SAYS_FULL = re.compile(r"no space left|os error 28|errno 28|disk quota", re.IGNORECASE)
ROOM = 1 << 20
"""A failed write with fewer free bytes counts as a full disk, whichever error the library raises."""
STALE_TRIES = 9
LOCK_POLL = 0.1
"""Seconds between two attempts to lock a file."""
LEFTOVER = re.compile(r"\.(?P<kind>tmp|old)-(?P<name>.+?)-\d+(-[0-9a-f]{8})?")
"""The temporary names of this module. Other hidden files are left alone."""


class QuietFileHandler(logging.FileHandler):
    """A log file that masks secrets and ignores write errors, such as a full disk, which other writes report.

    Lone surrogates, which text of models and tools may have, are written as escapes.
    """

    def __init__(self, filename: str | Path, delay: bool = False) -> None:
        super().__init__(filename, encoding="utf-8", delay=delay, errors="backslashreplace")

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))

    def _open(self) -> Any:
        with suppress(OSError):  # with `delay` the first record opens the file
            return super()._open()
        return Path(os.devnull).open("w")

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def write_atomic(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Replace the content of a file atomically: readers see the old content or the new."""
    # random, because processes of two machines may have the same number
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


def read_shared(path: Path) -> str:
    """The text of a file that another machine may replace meanwhile, which over NFS removes an open file."""
    for _ in range(STALE_TRIES):
        try:
            return path.read_text()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return path.read_text()


def lock(file: IO[Any], kind: int, seconds: float) -> None:
    """Lock an open file (fcntl.LOCK_SH or LOCK_EX); the kernel unlocks it when its holder ends.

    Raises BlockingIOError if another process holds it for longer than `seconds`.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        time.sleep(LOCK_POLL)
    return fcntl.flock(file, kind | fcntl.LOCK_NB)


@contextmanager
def atomic_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block succeeds, and is removed when it fails.

    replace: replace an existing `path` instead of raising FileExistsError. A full disk raises OSError, whatever a
    library in the block has raised.
    """
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists")
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    if os.path.lexists(temporary):
        remove(temporary)
    temporary.mkdir(parents=True)
    try:
        with full_disk_as_oserror(path):
            yield temporary
        for written in [*temporary.rglob("*"), temporary]:
            sync_path(written)
        _swap(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_path(path.parent)


@contextmanager
def full_disk_as_oserror(path: Path) -> Iterator[None]:
    """A block that writes `path`, in which any error of a full disk becomes an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        folder = path.parent
        if SAYS_FULL.search(str(error)) or (folder.exists() and shutil.disk_usage(folder).free < ROOM):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def clear_leftovers(folder: Path, name: str = "") -> None:
    """Clean up after a killed process: delete temporary files, and restore a folder that was being replaced.

    name: of the one file or folder to clean up after; otherwise of all. No other process may write it meanwhile.
    """
    for path in sorted(folder.glob(".*")):
        if not (found := LEFTOVER.fullmatch(path.name)) or name not in ("", found["name"]):
            continue
        whole = path.with_name(found["name"])
        if found["kind"] == "old" and not os.path.lexists(whole):
            path.rename(whole)
        else:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a folder, or a symbolic link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _swap(temporary: Path, path: Path) -> None:
    if not os.path.lexists(path):
        temporary.rename(path)
        return
    old = path.with_name(f".old-{path.name}-{os.getpid()}")
    path.rename(old)
    temporary.rename(path)
    remove(old)


def sync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
