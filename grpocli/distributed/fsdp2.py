"""hardware.parallel=fsdp2: every process holds a shard of each weight, its gradient and its optimizer state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from grpocli.distributed.parallel import Make, Parallel, loss_scaler, step

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from grpocli.distributed.sharded_safetensors import StoredTensor


class Fsdp2(Parallel):
    """torch's `fully_shard` on each decoder layer and on the rest; accelerate's FSDP2 plugin supports no CPU.

    Weights are float32 shards; a layer is gathered in its compute dtype, and freed after its forward and its backward.
    Gradients are summed into float32 shards after every micro-batch.
    """

    replicated = False

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device)
        self.size = accelerator.num_processes
        self.mesh = init_device_mesh(self.device.type, (self.size,))

    def loading(self) -> AbstractContextManager[None]:
        return loading_on_local_rank0()

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        self._shard_all(model, dtype)
        self.scaler = loss_scaler(self.device, dtype)
        return model, make(model)

    def prepare_frozen(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        return self._shard_all(model.requires_grad_(False), dtype)

    def _shard_all(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """Move one layer at a time to the device, broadcast it from the main process and shard it."""
        policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
        for module in [*layers(model), model]:
            for tensor in [*module.parameters(), *module.buffers()]:
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(self.device)
                    torch.distributed.broadcast(tensor.data, src=0)
            root = module is model  # embeddings and head are used first and last, so they stay gathered in between
            fully_shard(module, mesh=self.mesh, reshard_after_forward=not root, mp_policy=policy)
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo cannot average
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # losses are summed, not averaged
        return model

    @contextmanager
    def autocast(self, model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """No autocast, which would cache a cast of every layer: layers are gathered in `dtype` already."""
        yield
        if not torch.is_grad_enabled():
            model.reshard()  # type: ignore[operator]  # otherwise the root's weights stay gathered for a backward

    def update(self, wrapped: torch.nn.Module, optimizer: Any, rate: float, limit: float) -> Tensor:
        return self.gather(step(wrapped, optimizer, rate, limit, self.scaler))

    @contextmanager
    def sampling(self, model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """All layers stay gathered after a forward of one token, which every process makes."""
        for layer in layers(model):
            layer.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
        try:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
            yield
        finally:
            for layer in layers(model):
                layer.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def restore_moments(self, optimizer: Any, parameter: torch.nn.Parameter, moments: dict[str, StoredTensor]) -> None:
        if moments:
            optimizer.state[parameter] = {name: self._part(stored, parameter) for name, stored in moments.items()}

    def _part(self, stored: StoredTensor, parameter: torch.nn.Parameter) -> Tensor:
        """This process's rows, split as `fully_shard` does: the same number for each process, the last get fewer."""
        if not isinstance(parameter, DTensor) or not stored.shape:  # a counter
            return stored.whole().to(self.device)
        rows, rank = parameter.shape[0], self.mesh.get_local_rank()
        each = -(-rows // self.size)
        start, end = min(rank * each, rows), min((rank + 1) * each, rows)
        return DTensor.from_local(
            stored.rows(start, end).to(self.device),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers, innermost first: the modules that transformers does not split between devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in reversed(list(model.modules())) if {cls.__name__ for cls in type(m).__mro__} & names]


LOADING = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
"""Makes transformers read weights in one process of each machine; in the others they are zeros."""


class _Untouched(TorchFunctionMode):
    """Replaces zeros by uninitialised memory, which takes no room until it is written."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (torch.empty_like if func is torch.zeros_like else func)(*args, **(kwargs or {}))


@contextmanager
def loading_on_local_rank0() -> Iterator[None]:
    """A block in which only the first process of each machine reads the weights of models from disk.

    In the others weights and buffers are undefined until they are broadcast from the main process.
    """
    before = {name: os.environ[name] for name in LOADING.keys() & os.environ.keys()}
    os.environ.update(LOADING)
    with nullcontext() if os.environ.get("LOCAL_RANK", "0") == "0" else _Untouched():
        yield
    for name in LOADING:
        del os.environ[name]
    os.environ.update(before)
