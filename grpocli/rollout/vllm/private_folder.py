"""Folders for a server's weights and sockets, which go with their owner: by itself, by its guard, or by the next start.

Each holds a lock file that its owners have locked. A lock and not a pid, because containers share /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpocli.rollout.vllm.endpoint import SHM

ROOM = 2**30  # a memory file system with less than this is too small for weights
PREFIX = "grpocli-weights-"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """lock: a descriptor. The folder is in use for as long as any process holds it."""

    path: Path
    lock: int


@contextlib.contextmanager
def private_folder() -> Iterator[PrivateFolder]:
    """A new folder in shared memory, or in the temporary folder where that is small; removed after the block.

    Folders of dead owners are removed first.
    """
    sweep()
    folder = _new_folder()
    try:
        yield folder
    finally:
        _remove(folder.path)
        os.close(folder.lock)


def sweep() -> None:
    """Remove this user's folders that nobody owns any more, and the shared memory that belonged to them."""
    for place in {SHM, Path(tempfile.gettempdir())}:
        for path in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # in use, or being removed
                if path.lstat().st_uid != os.getuid():
                    continue
                lock = os.open(path / LOCK, os.O_RDWR)  # older versions have none: who knows whether they live
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)


def shared_memory_name(folder: Path) -> str:
    """What the names of a server's pieces of shared memory begin with: they are no files in its folder."""
    return folder.name.removeprefix(PREFIX)


def shared_memory_patterns(folder: Path) -> list[str]:
    """Of the files in SHM that belong to a server's folder."""
    name = shared_memory_name(folder)
    return [f"{name}_*", f"sem.{name}-*"]


def _new_folder() -> PrivateFolder:
    in_memory = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free >= ROOM
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM if in_memory else None))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody can lock it, so nobody removes it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:  # else it was swept between the last two lines
            return PrivateFolder(path, lock)
        os.close(lock)


def _remove(folder: Path) -> None:
    for pattern in shared_memory_patterns(folder):
        for piece in SHM.glob(pattern):
            piece.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
