"""The time that a sandbox has used. Waiting for a core does not count, so a busy machine makes no program wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

MOST_WAITING = 4.0
"""On a busy machine a program may take up to this many times its time limit."""
TICK = os.sysconf("SC_CLK_TCK")


class Clock:
    """Measures processes and all processes below them, from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._computed, self._waited = self._used()

    def spent(self) -> float:
        """Seconds of wall-clock time without waiting for a core, or of processor time, whichever is more."""
        elapsed = time.monotonic() - self._began
        if elapsed < RESOLUTION:
            return elapsed
        computed, waited = self._used()
        waited = min(waited - self._waited, elapsed * (1 - 1 / MOST_WAITING))
        return max(computed - self._computed, elapsed - waited)

    def _used(self) -> tuple[float, float]:
        """Processor seconds of the processes, and seconds that they waited for a core."""
        computed = waited = 0.0
        for pid in _below(self._pids):
            try:
                fields = _fields(pid)
                computed += sum(map(int, fields[11:15])) / TICK  # of the process and of its ended children
                waited += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError):  # it has ended, or the kernel has no such count
                continue
        return computed, waited


RESOLUTION = 0.01
"""Seconds below which wall-clock time is exact enough."""


def _below(pids: Iterable[int]) -> Iterator[int]:
    """The processes and all processes below them."""
    for pid in pids:
        yield pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                yield from _below(map(int, children.read_text().split()))


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
