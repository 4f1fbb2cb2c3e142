"""The vLLM side of the `shm` transport: reads weights from safetensors files in one folder, and nowhere else.

What comes over the wire is JSON with a file's name. The folder is fixed by the server's environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from grpocli.rollout.vllm.weights import MappedFiles, weights_folder


@dataclass
class ShmInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on: the folder comes from the environment."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One file of weights, by name; keep: it will be written again, and loaded again by this name."""

    file: str
    keep: bool = False


class ShmWeightTransfer(WeightTransferEngine[ShmInit, ShmUpdate]):  # type: ignore[misc]
    """start -> update (once a file) -> finish; vLLM's loader fuses, shards and casts as it does from a checkpoint."""

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.files = MappedFiles()

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        """Raises RuntimeError if the server was started without a folder."""
        weights_folder()
        self.files.forget()

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, but it synchronizes an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdate) -> None:
        weights = self.files.tensors(update_info.file, weights_folder(), update_info.keep)
        with partial_load(), embeddings_unpacked(self.model):
            self.model.load_weights(iter(weights))
        keep_waiting_weights(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with embeddings_unpacked(self.model):
            finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)

    def shutdown(self) -> None:
        self.files.forget()


def keep_waiting_weights(model: torch.nn.Module) -> None:
    """Copy what vLLM holds back until a layer is complete: the file that it looks into will be written again, or go."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for name, value in bound.arguments.items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    bound.arguments[name] = value.clone()


def partial_load() -> AbstractContextManager[None]:
    """One file may hold part of the model only; newer vLLM versions would miss multi-token-prediction layers."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    return cast("AbstractContextManager[None]", disable_mtp_completeness_check())


def embeddings(model: torch.nn.Module) -> list[Any]:
    """Embeddings and output heads that are not quantized: those that vLLM packs for matrix products on a CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    found = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return [module for module in found if isinstance(module.quant_method, UnquantizedEmbeddingMethod)]


@contextmanager
def embeddings_unpacked(model: torch.nn.Module) -> Iterator[None]:
    """A block in which vLLM packs no embedding: each takes longer than to copy the model, and `pack_heads` follows."""
    methods = [module.quant_method for module in embeddings(model)]
    for method in methods:
        method.process_weights_after_loading = lambda layer: None
    try:
        yield
    finally:
        for method in methods:
            vars(method).pop("process_weights_after_loading", None)


def pack_heads(model: torch.nn.Module) -> None:
    """Pack the output head, which may be an embedding: vLLM leaves a tied one with the packed copy of old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    found = embeddings(model)
    for module in [module for module in found if isinstance(module, ParallelLMHead)] or found:
        module.quant_method.process_weights_after_loading(module)
