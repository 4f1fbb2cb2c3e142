"""The time that a sandbox has used, without waits for a core, so that a busy machine does not make programs fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

MAX_SLOWDOWN = 4.0
"""On a busy machine a program may take up to this many times its time limit."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Clock:
    """The time that processes and their descendants use, from the creation of the clock on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._computed, self._waited = self._used()

    def spent(self) -> float:
        """Wall-clock seconds without waits for a core, or processor seconds, whichever is more."""
        elapsed = time.monotonic() - self._began
        if elapsed < RESOLUTION:
            return elapsed
        computed, waited = self._used()
        waited = min(waited - self._waited, elapsed * (1 - 1 / MAX_SLOWDOWN))
        return max(computed - self._computed, elapsed - waited)

    def _used(self) -> tuple[float, float]:
        """Processor seconds of the processes, and seconds that they waited for a core."""
        computed = waited = 0.0
        for pid in _with_descendants(self._pids):
            try:
                fields = _fields(pid)
                computed += sum(map(int, fields[11:15])) / TICKS_PER_SECOND  # of the process and of its ended children
                waited += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError):  # it has ended, or the kernel has no such count
                continue
        return computed, waited


RESOLUTION = 0.01
"""Seconds below which wall-clock time is exact enough."""


def _with_descendants(pids: Iterable[int]) -> Iterator[int]:
    """The processes and all their descendants."""
    for pid in pids:
        yield pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                yield from _with_descendants(map(int, children.read_text().split()))


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
