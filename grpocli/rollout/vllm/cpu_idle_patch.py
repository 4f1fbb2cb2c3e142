"""vLLM's processes on a CPU wait for each other without holding a core.

A reader of their queue in shared memory spins for a second after each message. With a GPU that hides latency; here the
engine core would hold one core while the worker computes, and the worker one while we train.
"""

from __future__ import annotations

import time

NAP = 5e-4
"""Seconds between two looks. A token takes far longer on a CPU."""


def wait_asleep() -> None:
    """Have this process's readers and writers sleep for a moment where they would spin. Safe to call again.

    Not until they are woken, as vLLM does after that second: of its wake-up calls some are lost.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(NAP)
