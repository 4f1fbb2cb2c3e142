"""vLLM's plugin entry point (`vllm.general_plugins`): vLLM calls `register` in each of its processes."""

from __future__ import annotations

import os
import time
from functools import partial

from grpocli.rollout.vllm.api_server import PRIVATE_FOLDER_VARIABLE

BACKENDS = {"shm": "shm", "nccl": "nccl", "ipc": "ipc_json"}
"""vLLM's `--weight-transfer-config` backend for each transport; "nccl" is vLLM's own."""
ENGINES = {
    "shm": ("grpocli.rollout.vllm.weight_transfer", "ShmWeightTransfer"),
    "ipc_json": ("grpocli.rollout.vllm.weight_transfer", "JsonIpcWeightTransfer"),
}
NAP = 5e-4  # seconds that a waiting process sleeps between checks; a token takes far longer on a CPU


def register() -> None:
    """Register the backends of weights; on a CPU, let waiting processes sleep, and leave out ranks in own servers."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        wait_asleep()
        if PRIVATE_FOLDER_VARIABLE in os.environ:
            leave_out_ranks()
    for name, (module, engine) in ENGINES.items():
        if name not in Factory._registry:
            Factory.register_engine(name, module, engine)


def wait_asleep() -> None:
    """Let this process sleep for `NAP` instead of spinning on vLLM's queue in shared memory. Safe to call again.

    vLLM spins for a second after each message. With a GPU that hides latency; on a CPU the engine core would occupy a
    core while the worker computes, and the worker one while the trainer computes.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = partial(time.sleep, NAP)


def leave_out_ranks() -> None:
    """Let the rank of every token be 0, which nobody reads: even eager vLLM compiles its count, for 2 to 9 s."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda logprobs, chosen: chosen.new_zeros(len(chosen)).long()
