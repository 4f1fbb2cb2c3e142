"""vLLM's processes on a CPU sleep while they wait for each other."""

from __future__ import annotations

import time

import pytest

from grpocli.rollout.vllm.plugin import register

SECONDS = 0.4


@pytest.mark.vllm
def test_a_waiting_reader_leaves_the_core_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast  # slow import, so only here

    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)  # restored after the test
    register()
    reader = shm_broadcast.SpinCondition.__new__(shm_broadcast.SpinCondition)
    reader.is_reader, reader.last_read, reader.busy_loop_s = True, time.monotonic(), 1.0
    held, end = time.process_time(), time.monotonic() + SECONDS
    while time.monotonic() < end:
        reader.wait()
    assert time.process_time() - held < SECONDS / 2
