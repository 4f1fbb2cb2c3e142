"""vLLM's plugin entry point (`vllm.general_plugins`): vLLM calls `register` in each of its processes."""

from __future__ import annotations

ENGINES = {
    "shm": ("grpocli.rollout.vllm.worker", "ShmWeightTransfer"),
    "ipc_json": ("grpocli.rollout.vllm.worker_ipc", "JsonIpcWeightTransfer"),
}


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "shm"}'` and "ipc_json" known to vLLM; on a CPU, have its processes
    wait asleep. Safe to call again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.platforms import current_platform

    from grpocli.rollout.vllm.cpu_idle_patch import wait_asleep

    if current_platform.is_cpu():
        wait_asleep()
    for name, (module, engine) in ENGINES.items():
        if name not in Factory._registry:
            Factory.register_engine(name, module, engine)
