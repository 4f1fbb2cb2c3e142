"""How trainer processes share the update: one class for each choice of `hardware.parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from grpocli.distributed.sharded_safetensors import Stored

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""The optimizer over a model's parameters."""


class Parallel(Protocol):
    """What a trainer process does otherwise because there are others. Every method is collective unless it says so.

    whole: whether each has every weight and all of the optimizer's state, so that `gather` and `moments` ask nobody.
    """

    whole: bool

    def loading(self) -> AbstractContextManager[None]:
        """While models are read from disk, before `share` or `freeze`. Not collective."""
        ...

    def share(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        """The model on its device as training calls it, and its optimizer. `model` itself stays usable, in place."""
        ...

    def freeze(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """A model on its device that takes no gradients."""
        ...

    def computing(self, model: torch.nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Around every forward of a model that computes in `dtype` with float32 weights. Not collective."""
        ...

    def accumulating(self, wrapped: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around each micro-batch of an update, forward and `backward`; `last`: of this update."""
        ...

    def backward(self, wrapped: torch.nn.Module, loss: Tensor) -> None:
        """Add this loss's gradient. Losses of processes are parts of one sum."""
        ...

    def update(self, wrapped: torch.nn.Module, optimizer: Any, rate: float, limit: float) -> Tensor:
        """One step at learning rate `rate` with gradients scaled down to the norm `limit` (0: never); forget them.

        Returns their norm before, over the weights of all processes.
        """
        ...

    def sampling(self, model: torch.nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """In the block, without gradients, this process calls `model` as often as it likes. To enter is collective."""
        ...

    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The parameters by name, as `gather` takes them. Every process walks through them in this order."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """One of `parameters`, or a tensor like it of the optimizer's, whole."""
        ...

    def moments(self, optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer keeps of a trained parameter, by name, whole; nothing before the first update."""
        ...

    def remember(self, optimizer: Any, parameter: torch.nn.Parameter, moments: dict[str, Stored]) -> None:
        """Have the optimizer keep that: each process reads its part. Not collective."""
        ...


class Alone:
    """One process: plain torch."""

    whole = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def share(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        model.to(self.device)
        return model, make(model.parameters())

    def freeze(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        return model.requires_grad_(False).to(self.device)

    def computing(self, model: torch.nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Autocast to `dtype`, where that is not float32."""
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype)

    def accumulating(self, wrapped: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, wrapped: torch.nn.Module, loss: Tensor) -> None:
        loss.backward()

    def update(self, wrapped: torch.nn.Module, optimizer: Any, rate: float, limit: float) -> Tensor:
        return step(wrapped, optimizer, rate, limit)

    def sampling(self, model: torch.nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """One autocast region in which every weight is cast once."""
        return _sampling(model, self.computing(model, dtype))

    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        return model.named_parameters()

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def moments(self, optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in optimizer.state.get(parameter, {}).items():
            yield name, self.gather(tensor)

    def remember(self, optimizer: Any, parameter: torch.nn.Parameter, moments: dict[str, Stored]) -> None:
        if moments:
            optimizer.state[parameter] = {name: stored.whole().to(self.device) for name, stored in moments.items()}


class Ddp(Alone):
    """`ddp`: every process has all weights and the whole optimizer; gradients are averaged, by accelerate."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device)
        self.accelerator = accelerator

    def share(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        return self.accelerator.prepare_model(model), make(model.parameters())

    def accumulating(self, wrapped: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Gradients stay in this process until the last backward of an update."""
        no_sync: AbstractContextManager[Any] = self.accelerator.no_sync(wrapped)
        return nullcontext() if last else no_sync

    def backward(self, wrapped: torch.nn.Module, loss: Tensor) -> None:
        self.accelerator.backward(loss * self.accelerator.num_processes)  # DDP averages


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, limit: float) -> Tensor:
    """`Parallel.update` by torch alone: gradients are those of the parameters, plain tensors or DTensors."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit or float("inf")).detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@contextmanager
def _sampling(model: torch.nn.Module, computing: AbstractContextManager[Any]) -> Iterator[None]:
    with _casts_kept(model), computing:
        yield


@contextmanager
def _casts_kept(model: torch.nn.Module) -> Iterator[None]:
    """Autocast keeps the casts of weights that take gradients only: frozen ones would be cast again for every token."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
