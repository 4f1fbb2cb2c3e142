"""What grpocli sets for the libraries: less output, and what makes training on a CPU faster (OpenMP, pages, malloc)."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import MutableMapping

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # malloc.h
MAX_THRESHOLD = 2**31 - 1
PADDING = 64 * 2**20
"""Bytes by which the heap grows at a time."""


def quiet_libraries() -> None:
    """Switch off the libraries' progress bars and advice, which would tear the live view. Warnings go to the log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # its errors are exceptions, which grpocli reports
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


def shorten_spinning(env: MutableMapping[str, str]) -> None:
    """Make OpenMP threads sleep soon instead of spinning while they wait for each other.

    With the default, a run on a CPU becomes ten times slower when another program occupies a core. libgomp reads the
    variable when torch is loaded. A value of the user's stays.
    """
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", "5000")


def use_large_pages() -> None:
    """Make torch request pages of 2 MiB for tensors. Torch reads the variable when it first allocates one."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next tensors. Returns whether it does.

    By default glibc maps every large tensor anew and unmaps it at once, and the kernel fills each page with zeros:
    a quarter of a step's time. Settings in the environment and other implementations of malloc stay as they are.
    """
    set_here = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
    theirs = any(name in os.environ for name in set_here) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if theirs or mallopt is None:
        return False
    if not any(mallopt(MMAP_THRESHOLD, value) for value in (MAX_THRESHOLD, 32 * 2**20)):  # the second for older glibc
        return False  # the settings below would only switch off glibc's own tuning of the threshold
    return bool(mallopt(TRIM_THRESHOLD, MAX_THRESHOLD)) and bool(mallopt(TOP_PAD, PADDING))
