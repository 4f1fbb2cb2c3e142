"""The vLLM side of the `shm` transport: reads weights from safetensors files in one folder, and nowhere else.

What comes over the wire is JSON with a file's name. The folder is fixed by the server's environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from grpocli.rollout.vllm.weights import checked_path, weights_folder


@dataclass
class ShmInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on: the folder comes from the environment."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One file of weights, by name."""

    file: str


class ShmWeightTransfer(WeightTransferEngine[ShmInit, ShmUpdate]):  # type: ignore[misc]
    """start -> update (once a file) -> finish; vLLM's loader fuses, shards and casts as it does from a checkpoint."""

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        """Raises RuntimeError if the server was started without a folder."""
        weights_folder()

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, but it synchronizes an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdate) -> None:
        path = checked_path(update_info.file, weights_folder())
        with partial_load():
            self.model.load_weights(tensors(path))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_embeddings(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            yield name, file.get_tensor(name)


def partial_load() -> AbstractContextManager[None]:
    """One file may hold part of the model only; newer vLLM versions would miss multi-token-prediction layers."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    return cast("AbstractContextManager[None]", disable_mtp_completeness_check())


def repack_embeddings(model: torch.nn.Module) -> None:
    """On a CPU an output head that is tied to the embedding keeps a packed copy of the old weights: pack again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
