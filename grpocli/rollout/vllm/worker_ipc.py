"""The vLLM side of the `ipc` transport: vLLM's own engine, with handles that come as JSON and never as a pickle.

It has not been run on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

from grpocli.rollout.vllm.transport_ipc import decode_handles


@dataclass
class JsonIpcUpdate(IPCWeightTransferUpdateInfo):  # type: ignore[misc]
    """As vLLM's, but `ipc_handles` are what `encode_handles` makes."""

    ipc_handles: Any = None

    def __post_init__(self) -> None:
        if self.ipc_handles_pickled is not None:
            raise ValueError("IPC handles are taken as JSON only, not as a pickle")
        self.ipc_handles = decode_handles(self.ipc_handles)
        super().__post_init__()


class JsonIpcWeightTransfer(IPCWeightTransferEngine):  # type: ignore[misc]
    """See the module."""

    update_info_cls = JsonIpcUpdate
