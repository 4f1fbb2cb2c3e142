"""The time that a sandbox has spent, so that a busy machine makes no right program wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

BUSY = 4.0
"""So many times its time limit a program may take on a busy machine."""
TICK = os.sysconf("SC_CLK_TCK")


class Clock:
    """Of processes and all that they start, from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._computed, self._waited = self._used()

    def spent(self) -> float:
        """Seconds by the clock without those of waiting for a core, or the processor's where they are more."""
        elapsed = time.monotonic() - self._began
        if elapsed < SOON:
            return elapsed
        computed, waited = self._used()
        waited = min(waited - self._waited, elapsed * (1 - 1 / BUSY))
        return max(computed - self._computed, elapsed - waited)

    def _used(self) -> tuple[float, float]:
        """Seconds that cores computed for the processes, and that these waited for a core."""
        computed = waited = 0.0
        for pid in _below(self._pids):
            try:
                fields = _fields(pid)
                computed += sum(map(int, fields[11:15])) / TICK  # its own, and of children that have ended
                waited += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError):  # it has ended, or the kernel does not count
                continue
        return computed, waited


SOON = 0.01
"""Seconds in which nothing is worth looking at."""


def _below(pids: Iterable[int]) -> Iterator[int]:
    """These processes and all below them."""
    for pid in pids:
        yield pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                yield from _below(map(int, children.read_text().split()))


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the process's state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
