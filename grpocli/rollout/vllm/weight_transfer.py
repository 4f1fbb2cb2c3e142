"""vLLM's side of shm, ipc and the in-process transfer; `sync=nccl` uses vLLM's own class.

vLLM calls these classes in its workers, and its own loader takes the weights. `plugin.py` registers `ShmWeightTransfer`
and `JsonIpcWeightTransfer` in servers, and `register_in_process_transfer` registers `InProcessWeightTransfer` in the
trainer's process for `engine=vllm_colocate`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

from grpocli.rollout.vllm.transports import WEIGHTS_FOLDER_VARIABLE, MappedFiles, decode_handles


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the folder of shm comes from the server's environment, and the in-process transfer has no connection."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """file: the name of a file of weights. keep: stay mapped, because later syncs rewrite the file."""

    file: str
    keep: bool = False


class LoaderWeightTransfer(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Applies an update with vLLM's own loader, like a checkpoint. Subclasses define `receive_weights`."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like the base class, which would synchronize an accelerator on a CPU too."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with without_packing_embeddings(self.model):
            finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)
        if self.device.type == "cpu":
            pack_experts(self.model)

    def shutdown(self) -> None:
        """Do nothing: no connection is open."""


class ShmWeightTransfer(LoaderWeightTransfer):
    """sync=shm: reads safetensors files in one folder only, one update for each file."""

    init_info_cls = NoInit
    update_info_cls = ShmUpdate

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.files = MappedFiles()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Forget the files of an earlier transfer."""
        self.files.forget()

    def receive_weights(self, update_info: ShmUpdate) -> None:
        """Load a file, which may hold only a part of the model."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        folder = Path(os.environ[WEIGHTS_FOLDER_VARIABLE]).resolve()
        weights = self.files.tensors(update_info.file, folder, update_info.keep)
        with disable_mtp_completeness_check(), without_packing_embeddings(self.model):
            self.model.load_weights(iter(weights))
        keep_waiting_weights(self.model)

    def shutdown(self) -> None:
        self.files.forget()


def keep_waiting_weights(model: torch.nn.Module) -> None:
    """Copy the tensors that vLLM keeps until their layer is complete, since their file is rewritten or removed."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for name, value in bound.arguments.items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    bound.arguments[name] = value.clone()


def embeddings(model: torch.nn.Module) -> list[Any]:
    """Unquantized embeddings and output heads, which vLLM packs for matrix products on a CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    found = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return [module for module in found if isinstance(module.quant_method, UnquantizedEmbeddingMethod)]


@contextmanager
def without_packing_embeddings(model: torch.nn.Module) -> Iterator[None]:
    """Keep vLLM from packing embeddings, which takes longer than copying the model; `pack_heads` follows."""
    methods = [module.quant_method for module in embeddings(model)]
    for method in methods:
        method.process_weights_after_loading = lambda layer: None
    try:
        yield
    finally:
        for method in methods:
            vars(method).pop("process_weights_after_loading", None)


def pack_heads(model: torch.nn.Module) -> None:
    """Pack the output head, which may be an embedding: vLLM would keep the packed copy of a tied one's old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    found = embeddings(model)
    for module in [module for module in found if isinstance(module, ParallelLMHead)] or found:
        module.quant_method.process_weights_after_loading(module)


def pack_experts(model: torch.nn.Module) -> None:
    """Pack experts for a CPU's kernels: vLLM does so at its start only, and would read new ones as packed ones."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


@dataclass
class JsonIpcUpdate(IPCWeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's update, with the output of `encode_handles` as `ipc_handles`."""

    ipc_handles: Any = None

    def __post_init__(self) -> None:
        if self.ipc_handles_pickled is not None:
            raise ValueError("IPC handles are taken as JSON only, not as a pickle")
        self.ipc_handles = decode_handles(self.ipc_handles)
        super().__post_init__()


class JsonIpcWeightTransfer(IPCWeightTransferEngine):  # type: ignore[misc]
    """sync=ipc: vLLM's own engine, with handles as JSON instead of a pickle."""

    update_info_cls = JsonIpcUpdate


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The whole model: (Hugging Face name, tensor), on any device."""

    weights: Iterable[tuple[str, torch.Tensor]]


class InProcessWeightTransfer(LoaderWeightTransfer):
    """engine=vllm_colocate: takes the trainer's tensors themselves, which vLLM's loader copies."""

    init_info_cls = NoInit
    update_info_cls = InProcessUpdate

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: there is no connection."""

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        with torch.no_grad(), without_packing_embeddings(self.model):
            self.model.load_weights(update_info.weights)


def register_in_process_transfer(backend: str) -> None:
    """Register `weight_transfer_config={"backend": backend}` in this process. Safe to call again."""
    if backend not in Factory._registry:
        Factory.register_engine(backend, InProcessWeightTransfer)
