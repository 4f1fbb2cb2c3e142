"""A bound on the memory of all processes of a sandbox together: Linux's control groups, where they can be had."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NAME = "grpocli-sandbox-"
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""In version 2, and in version 1."""
SWAP = {"memory.swap.max": 0, "memory.memsw.limit_in_bytes": 1}
"""Where there is swap: none, or as much as memory and swap together may be (times the limit)."""
ENTER = ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"']
"""Puts itself into a group, and is then the command after it."""
OLD = 600.0
"""Seconds after which a group without processes is nobody's: they enter it as soon as it is made."""
_numbers = count()


@contextmanager
def group(memory_mb: int) -> Iterator[list[str]]:
    """What comes before a command that is to be in a group with so much memory; nothing where none can be made.

    Its processes have to end within the block.
    """
    parent = place()
    if parent is None:
        yield []
        return
    folder = parent / f"{NAME}{os.getpid()}-{next(_numbers)}"
    try:
        _make(folder, memory_mb * 2**20)
        yield [*ENTER, str(folder / "cgroup.procs")]
    finally:
        _remove(folder)


@lru_cache(maxsize=1)
def place() -> Path | None:
    """Where groups can be made: in this process's own, or beside it, as one with processes may have none below it."""
    for folder in _candidates():
        trial = folder / f"{NAME}{os.getpid()}-trial"
        try:
            _make(trial, 2**26)
        except OSError:
            continue
        finally:
            _remove(trial)
        for left in folder.glob(f"{NAME}*"):  # by workers that were killed; one in use cannot be removed
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > OLD:
                    left.rmdir()
        return folder
    return None


def _candidates() -> list[Path]:
    """Of this process's group and the one above it, in version 1 for memory."""
    found = []
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                own = ROOT / controllers / path.lstrip("/")
                found += [own, own.parent] if path != "/" else [own]
    return found


def _make(folder: Path, size: int) -> None:
    """Raises OSError where that is not allowed, or has no limit on memory."""
    folder.mkdir()
    limit = next((folder / name for name in LIMITS if (folder / name).exists()), None)
    if limit is None:
        raise FileNotFoundError(f"{folder} has no limit on memory")
    limit.write_text(str(size))
    for name, factor in SWAP.items():
        if (folder / name).exists():
            with suppress(OSError):  # there is no swap
                (folder / name).write_text(str(size * factor))


def _remove(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # what was killed has not quite ended
            time.sleep(0.01)
