"""vLLM's side of `engine=vllm_colocate`: a weight transfer that takes the trainer's tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

from grpocli.rollout.vllm.worker import ShmWeightTransfer, embeddings_unpacked

BACKEND = "direct"


def register() -> None:
    """Make `weight_transfer_config={"backend": "direct"}` known to vLLM in this process. Safe to call again."""
    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, DirectWeightTransfer)


@dataclass
class DirectInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on: both sides are one process."""


@dataclass
class DirectUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The whole model, once: (Hugging Face name, tensor), on any device."""

    weights: Iterable[tuple[str, torch.Tensor]]


class DirectWeightTransfer(ShmWeightTransfer):
    """Begins and ends an update as `shm` does. vLLM's loader copies each tensor; at most one layer's wait together."""

    init_info_cls = DirectInit
    update_info_cls = DirectUpdate

    def init_transfer_engine(self, init_info: DirectInit) -> None:
        """Nothing to connect."""

    def receive_weights(self, update_info: DirectUpdate) -> None:
        with torch.no_grad(), embeddings_unpacked(self.model):
            self.model.load_weights(update_info.weights)
