"""The trainer processes: all of accelerate that the trainer knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from grpocli.launch.hardware import Single

T = TypeVar("T")


class World:
    """This process among `size` of them, on `device`. Collective calls must be made by all, in one order."""

    def __init__(self, hardware: Single) -> None:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        cpu = hardware.device == "cpu" or not torch.cuda.is_available()
        self.accelerator: Accelerator = Accelerator(
            cpu=cpu,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=hardware.timeout))],
        )
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def gather_objects(self, items: Sequence[T]) -> list[T]:
        """Every process's items, in rank order."""
        if self.size == 1:
            return list(items)
        from accelerate.utils import gather_object

        return list(gather_object(list(items)))

    def broadcast_object(self, item: T) -> T:
        """The main process's item."""
        if self.size == 1:
            return item
        from accelerate.utils import broadcast_object_list

        box: list[Any] = [item]
        broadcast_object_list(box, from_process=0)
        return box[0]  # type: ignore[no-any-return]

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def sum(self, value: Tensor) -> Tensor:
        """The sum over processes, left on the device."""
        return self.accelerator.reduce(value, reduction="sum") if self.size > 1 else value

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with gradients summed over processes by `backward`."""
        wrapped: torch.nn.Module = self.accelerator.prepare_model(model)
        return wrapped

    @contextmanager
    def accumulating(self, model: torch.nn.Module, last: bool) -> Iterator[None]:
        """Gradients stay in this process until the last backward of an update."""
        if last or self.size == 1:
            yield
        else:
            with self.accelerator.no_sync(model):
                yield

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradient. Losses of processes are parts of one sum, but DDP averages: hence `size`."""
        self.accelerator.backward(loss * self.size)

    def close(self) -> None:
        self.accelerator.end_training()
