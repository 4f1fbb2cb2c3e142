"""How trainer processes share models and updates: one class for each choice of `hardware.parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from grpocli.distributed.sharded_safetensors import StoredTensor

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
"""Makes the optimizer of a model."""
FIRST_SCALE, GOOD_UPDATES = 2.0**16, 400
"""The first factor of losses in float16, and the updates without overflow after which it doubles."""


class Parallel:
    """The operations that depend on the number of trainer processes; of this class: plain torch in a single process.

    Every method is collective unless it says otherwise.
    """

    replicated = True
    """Whether every process has all weights and optimizer state, so that `gather` and `moments` do not communicate."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scaler = loss_scaler(device, torch.float32)

    def loading(self) -> AbstractContextManager[None]:
        """A block in which models are read from disk, before `prepare` and `prepare_frozen`. Not collective."""
        return nullcontext()

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        """The model as training calls it, on its device, and its optimizer. `model` itself is changed in place."""
        model.to(self.device)
        self.scaler = loss_scaler(self.device, dtype)
        return model, make(model)

    def prepare_frozen(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """A model without gradients, on its device."""
        return model.requires_grad_(False).to(self.device)

    def autocast(self, model: torch.nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """A context for forwards in `dtype` of a model with float32 weights. Not collective."""
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype)

    def accumulating(self, wrapped: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
        """A context for the forward and backward of a micro-batch. last: whether it is the last one of the update."""
        return nullcontext()

    def backward(self, wrapped: torch.nn.Module, loss: Tensor) -> None:
        """Add the gradient of a loss. The losses of all processes are summed."""
        self.scaler.scale(loss).backward()

    def update(self, wrapped: torch.nn.Module, optimizer: Any, rate: float, limit: float) -> Tensor:
        """One optimizer step at learning rate `rate`, with gradients clipped to the norm `limit` (0: not clipped).

        Clears the gradients and returns their norm before clipping, over all weights. In float16 a norm that is not
        finite means that all processes have skipped the step.
        """
        return step(wrapped, optimizer, rate, limit, self.scaler)

    @contextmanager
    def sampling(self, model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """A block without gradients in which each process calls `model` as often as it needs.

        Entering is collective. It is one autocast region, in which every weight is cast once.
        """
        with _casts_kept(model), self.autocast(model, dtype):
            yield

    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The parameters by name, for `gather`. Every process iterates over all of them."""
        return model.named_parameters()

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole tensor of a parameter or of a tensor of its optimizer state."""
        return tensor

    def moments(self, optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """The optimizer state of a parameter: names and whole tensors. Empty before the first update."""
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # torch's SGD without momentum
                yield name, self.gather(torch.as_tensor(value))

    def restore_moments(self, optimizer: Any, parameter: torch.nn.Parameter, moments: dict[str, StoredTensor]) -> None:
        """Restore the optimizer state of a parameter; each process reads its part. Not collective."""
        if moments:
            tensors = {name: stored.whole() for name, stored in moments.items()}
            optimizer.state[parameter] = {
                # an integer was one of Python, such as the number of updates in bitsandbytes
                name: tensor.item() if tensor.ndim == 0 and tensor.dtype == torch.int64 else tensor.to(self.device)
                for name, tensor in tensors.items()
            }


class Ddp(Parallel):
    """`ddp`: every process has all weights and all optimizer state; accelerate averages gradients."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device)
        self.accelerator = accelerator

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        self.scaler = loss_scaler(self.device, dtype)
        return self.accelerator.prepare_model(model), make(model)

    def accumulating(self, wrapped: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged in the last backward of an update only."""
        no_sync: AbstractContextManager[Any] = self.accelerator.no_sync(wrapped)
        return nullcontext() if last else no_sync

    def backward(self, wrapped: torch.nn.Module, loss: Tensor) -> None:
        self.accelerator.backward(self.scaler.scale(loss) * self.accelerator.num_processes)  # DDP averages


def loss_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """The scaler of losses whose gradients are computed in `dtype`: it does nothing unless that is float16.

    float16 rounds gradients below 6e-8 to 0 and has none above 65,504 (arXiv 1710.03740).
    """
    enabled = dtype == torch.float16
    return torch.amp.GradScaler(device.type, FIRST_SCALE, growth_interval=GOOD_UPDATES, enabled=enabled)


def step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, limit: float, scaler: torch.amp.GradScaler
) -> Tensor:
    """`Parallel.update` with torch, for parameters that are plain tensors or DTensors."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if limit and getattr(optimizer, "_step_supports_amp_scaling", False):
        # a fused optimizer divides while it reads the gradients, which saves a pass over them
        optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0)  # type: ignore[attr-defined]
    elif limit:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


@contextmanager
def _casts_kept(model: torch.nn.Module) -> Iterator[None]:
    """Autocast caches casts only of weights that require gradients; frozen ones would be cast for every token."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
