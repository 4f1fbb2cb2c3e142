"""Memory of a trainer on a CPU: kept when freed, in large pages."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # malloc.h
MOST = 2**31 - 1
HALF_A_HEAP = 32 * 2**20
"""The most that older versions of glibc take."""
AHEAD = 64 * 2**20


def large_pages() -> None:
    """Have torch ask for pages of 2 MiB for its tensors; read when it first makes one."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed() -> bool:
    """Have glibc keep what this process frees for its next tensors; whether it does.

    By default it maps every large tensor anew and gives it back at once, and the kernel fills each page with zeros:
    a quarter of a step's time. What was set in the environment stays. Nothing is done where malloc is another's.
    """
    theirs = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
    if sys.platform != "linux" or any(name in os.environ for name in theirs):
        return False
    if "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if not any(mallopt(MMAP_THRESHOLD, most) for most in (MOST, HALF_A_HEAP)):
        return False  # what follows would end glibc's own adjusting of it
    return bool(mallopt(TRIM_THRESHOLD, MOST)) and bool(mallopt(TOP_PAD, AHEAD))
