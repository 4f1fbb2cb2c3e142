"""Shared memory of guarded processes is removed with them, also when they are killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from grpocli.processes.guard import guarded

pytestmark = pytest.mark.processes

HOLDS = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=8)
print(memory.name, flush=True)
time.sleep(60)
"""


def test_shared_memory_of_a_killed_process_is_unlinked(tmp_path: Path) -> None:
    """Python's resource tracker does that if it gets the time."""
    log = tmp_path / "log"
    with guarded([sys.executable, "-c", HOLDS], name="holds", log=log, grace=0.2) as process:
        deadline = time.monotonic() + 20
        while not (log.exists() and log.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        memory = Path("/dev/shm", log.read_text().splitlines()[0])
        assert memory.exists()
        process.stop(0.2)
    assert not memory.exists()
