"""Limits the memory of all processes of a sandbox together, by Linux's control groups if the user may create them."""

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
"""The file of the memory limit in version 2 and in version 1."""
SWAP = {"memory.swap.max": 0, "memory.memsw.limit_in_bytes": 1}
"""Swap: none in version 2; in version 1 the limit of memory and swap together, as a multiple of the memory limit."""
ENTER = ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"']
"""Enters a group and then executes the command that follows."""
_numbers = count()


@contextmanager
def group(memory_mb: int) -> Iterator[list[str]]:
    """The words before a command that make it run in a group with this memory limit; none if groups are unavailable.

    The group's processes must end within the block.
    """
    parent = parent_group()
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
def parent_group() -> Path | None:
    """The group below which groups can be made: this process's group, or its parent; None if neither works.

    In version 2 a group with processes may have no groups below it.
    """
    for folder in _candidates():
        trial = folder / f"{NAME}{os.getpid()}-trial"
        try:
            _make(trial, 2**26)
        except OSError:
            continue
        finally:
            _remove(trial)
        for left in folder.glob(f"{NAME}*"):  # of workers that were killed; rmdir fails for a group in use
            if not Path("/proc", left.name.removeprefix(NAME).partition("-")[0]).exists():
                with suppress(OSError):
                    left.rmdir()
        return folder
    return None


def _candidates() -> list[Path]:
    """This process's group and its parent; in version 1 those of the memory controller."""
    found = []
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                own = ROOT / controllers / path.lstrip("/")
                found += [own, own.parent] if path != "/" else [own]
    return found


def _make(folder: Path, size: int) -> None:
    """Create the group. Raises OSError if the user may not, or if the group has no memory limit."""
    folder.mkdir()
    limit = next((folder / name for name in LIMITS if (folder / name).exists()), None)
    if limit is None:
        raise FileNotFoundError(f"{folder} has no limit on memory")
    limit.write_text(str(size))
    for name, factor in SWAP.items():
        if (folder / name).exists():
            with suppress(OSError):  # no swap
                (folder / name).write_text(str(size * factor))


def _remove(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # killed processes have not ended yet
            time.sleep(0.01)
