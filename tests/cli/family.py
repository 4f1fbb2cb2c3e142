"""The processes started by a test, their descendants, and their shared memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from cli.running import finish

from grpocli.processes.guard import alive
from grpocli.processes.reaper import TRACKER, descendants


class Family:
    """All processes of this test.

    They include processes that start later or that vLLM renames, which hides their environment.
    """

    def __init__(self) -> None:
        self.before = set(descendants())
        self.seen: set[int] = set()

    def engines(self) -> list[int]:
        """vLLM's engine processes. Its servers outlive them for a moment."""
        self.seen |= set(descendants()) - self.before
        return sorted(pid for pid in self.seen if b"EngineCore" in _read(pid, "cmdline") and alive(pid))

    def wait(self, process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str]:
        """The exit code and output of a process."""
        deadline = time.monotonic() + seconds
        while process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {seconds:g} s"
            self.engines()
            time.sleep(0.1)
        return finish(process)

    def memory(self) -> set[Path]:
        """Their shared memory: folders of weights, and the queues between vLLM's processes."""
        named = re.compile(rb"/dev/shm/[a-z0-9_]{8}_[0-9a-f]+|/dev/shm/grpocli-weights-[a-z0-9_]+")
        texts = [_read(pid, "maps") + _read(pid, "environ") for pid in self.seen]
        memory = {Path(os.fsdecode(name)) for text in texts for name in named.findall(text)}
        assert {path.name.startswith("grpocli-weights-") for path in memory} == {True, False}
        return memory

    def kill_named(self, process: subprocess.Popen[str]) -> None:
        """Kills the processes that a user finds by the name grpocli: all but those that vLLM has renamed."""
        named = [pid for pid in self.seen if b"grpocli" in _read(pid, "cmdline") or TRACKER in _read(pid, "cmdline")]
        for pid in named:
            os.kill(pid, signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL

    def assert_gone(self, memory: set[Path]) -> None:
        assert wait_gone(sorted(self.seen), 20) == []
        assert [path for path in memory if path.exists()] == []


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # the process has ended


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < count:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, f"no {count} steps within 240 s"
        time.sleep(0.01)


def wait_gone(pids: Sequence[int], timeout: float) -> list[int]:
    """Wait up to `timeout` seconds for processes to end. Returns those that still run."""
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
