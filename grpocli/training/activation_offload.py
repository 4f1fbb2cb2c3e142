"""train.activation_offload: activations wait for the backward pass in the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

LEAST = 2**20
"""Bytes of the smallest tensor that is moved."""


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A block in which the large tensors that autograd keeps are moved to the CPU, and back for the backward pass.

    torch's `save_on_cpu` would move weights, too. Copies go through pinned memory, in the order of the GPU's other
    work, so the CPU does not wait for them. weights: tensors that stay. devices: the kinds of devices that are
    relieved; on a CPU, nothing is moved.
    """

    def __init__(self, weights: Iterable[Tensor], devices: tuple[str, ...] = ("cuda",)) -> None:
        self.devices, self.moved = devices, 0
        self.stays = {_storage(weight) for weight in weights}
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[torch.device, Any] | Tensor:
        """What is kept of a tensor."""
        large = tensor.numel() * tensor.element_size() >= LEAST
        if not large or tensor.device.type not in self.devices or _storage(tensor) in self.stays:
            return tensor
        self.moved += 1
        return tensor.device, self.store(tensor)

    def unpack(self, kept: tuple[torch.device, Any] | Tensor) -> Tensor:
        """The tensor, on its device."""
        return kept if isinstance(kept, Tensor) else self.fetch(*kept)

    def store(self, tensor: Tensor) -> Any:
        """A copy in the CPU's memory."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor, non_blocking=True)
        return copy

    def fetch(self, device: torch.device, stored: Any) -> Tensor:
        """The stored tensor on its device."""
        tensor: Tensor = stored.to(device, non_blocking=True)
        return tensor


def offloading(chosen: bool, model: torch.nn.Module) -> AbstractContextManager[Any]:
    """A context for the forward pass of a model; with `train.activation_offload` an `ActivationOffload`."""
    return ActivationOffload(model.parameters()) if chosen else nullcontext()


def _storage(tensor: Tensor) -> int:
    """A number of the tensor's memory, which views share."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage()._cdata)
