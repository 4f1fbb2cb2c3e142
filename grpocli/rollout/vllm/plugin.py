"""vLLM's plugin entry point (`vllm.general_plugins`): vLLM calls `register` in each of its processes."""

from __future__ import annotations

ENGINES = {
    "shm": ("grpocli.rollout.vllm.worker", "ShmWeightTransfer"),
    "ipc_json": ("grpocli.rollout.vllm.worker_ipc", "JsonIpcWeightTransfer"),
}


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "shm"}'` and "ipc_json" known to vLLM. Safe to call again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    for name, (module, engine) in ENGINES.items():
        if name not in Factory._registry:
            Factory.register_engine(name, module, engine)
