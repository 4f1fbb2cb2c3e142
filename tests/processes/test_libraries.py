"""A trainer process keeps freed memory unless the environment configures malloc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

FAULTS = """
import ctypes, resource, sys
from grpocli.processes.libraries import keep_freed_memory
kept = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = libc.malloc(2**26)
    ctypes.memset(place, 1, 2**26)
    libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touch()
print(kept, touch())
"""


def faults(**env: str) -> tuple[str, int]:
    """Whether memory is kept, and the page faults of 64 MiB that are allocated a second time."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    out = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=clean | env)
    kept, pages = out.stdout.split()
    return kept, int(pages)


@pytest.mark.parametrize(
    ("theirs", "keeps"),
    [
        ({}, "True"),
        ({"MALLOC_ARENA_MAX": "2"}, "True"),
        ({"MALLOC_MMAP_THRESHOLD_": "262144"}, "False"),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=262144"}, "False"),
    ],
)
def test_freed_memory_is_kept_unless_the_environment_configures_it(theirs: dict[str, str], keeps: str) -> None:
    kept, pages = faults(**theirs)
    assert (kept, pages < 100) == (keeps, keeps == "True")
