"""vLLM's processes on a CPU sleep while they wait for each other."""

from __future__ import annotations

import time

import pytest
import torch

from grpocli.rollout.vllm.api_server import PRIVATE_FOLDER_VARIABLE
from grpocli.rollout.vllm.plugin import register

pytestmark = pytest.mark.vllm
SECONDS = 0.4


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


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("own", [True, False])
def test_only_our_own_servers_leave_out_ranks(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """The first request then compiles nothing. Others may read the ranks of a server that they start."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.sample import sampler

    count = sampler.batched_count_greater_than
    monkeypatch.setattr(sampler, "batched_count_greater_than", count)  # restored after the test
    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)
    monkeypatch.delenv(PRIVATE_FOLDER_VARIABLE, raising=False)
    if own:
        monkeypatch.setenv(PRIVATE_FOLDER_VARIABLE, "/nowhere")
    register()
    assert (sampler.batched_count_greater_than is count) is not own
    if own:
        assert sampler.batched_count_greater_than(torch.zeros(2, 3), torch.zeros(2, 1)).tolist() == [0, 0]
