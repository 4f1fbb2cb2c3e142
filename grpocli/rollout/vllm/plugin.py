"""vLLM's plugin entry point (`vllm.general_plugins`): vLLM calls `register` in each of its processes."""

from __future__ import annotations

BACKEND = "shm"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "shm"}'` known to vLLM. Safe to call again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "grpocli.rollout.vllm.worker", "ShmWeightTransfer")
