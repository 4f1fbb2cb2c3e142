"""The trainer processes and their collective calls. Only this file imports accelerate for training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grpocli.distributed.context_parallel import ContextParallel
from grpocli.distributed.parallel import Ddp, Parallel

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from grpocli.hardware import Hardware
    from grpocli.processes.reports import HeartbeatWriter

T = TypeVar("T")


class World:
    """This process among `size` processes, on `device`. All processes must make collective calls in the same order.

    A second thread has its own order: it makes its calls in a `channel`. `context_parallel` are the processes that
    share micro-batches. The rows of an update are dealt into `dp_size` parts, of which this one has number `dp_rank`.
    """

    def __init__(self, hardware: Hardware, heartbeat: HeartbeatWriter | None = None) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

        cpu = hardware.device == "cpu" or not torch.cuda.is_available()
        self.timeout = timedelta(seconds=hardware.timeout)
        self.accelerator: Accelerator = Accelerator(
            cpu=cpu,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=self.timeout),
                # gradients are stored once, in ddp's buckets; buffers of models are the same in all processes
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
            ],
        )
        # cuDNN plans each new length for about a second, and packed rows rarely repeat a length
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        self.parallel: Parallel = parallel_of(hardware, self.accelerator)
        cp_size = hardware.context_parallel if self.size > 1 else 1
        self.context_parallel = ContextParallel.of(self.rank, self.size, cp_size, self.timeout)
        self.dp_size, self.dp_rank = self.size // cp_size, self.rank // cp_size
        self._thread = threading.local()
        self._heartbeat = heartbeat

    def enter(self, stage: str, step: int | None = None) -> None:
        """Write the stage and step to this process's heartbeat, by which a process that hangs is found."""
        if self._heartbeat:
            self._heartbeat.step = self._heartbeat.step if step is None else step
            self._heartbeat.enter(stage)

    def channel(self) -> Callable[[], AbstractContextManager[None]]:
        """A channel: blocks in which another thread makes collective calls beside the main thread's. Collective.

        It is created in the main thread, and has its own process group, on the CPU.
        """
        if self.size == 1:
            return nullcontext
        group = torch.distributed.new_group(backend="gloo", timeout=self.timeout)

        @contextmanager
        def channel() -> Iterator[None]:
            self._thread.group = group
            yield
            del self._thread.group

        return channel

    @property
    def _group(self) -> torch.distributed.ProcessGroup | None:
        """The process group of this thread's channel; None in the main thread."""
        return getattr(self._thread, "group", None)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self._group:
            torch.distributed.barrier(self._group)
        else:
            self.accelerator.wait_for_everyone()

    def gather_objects(self, items: Sequence[T]) -> list[T]:
        """Every process's items, in rank order."""
        if self.size == 1:
            return list(items)
        everyone: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyone, list(items), group=self._group)
        return [item for one in everyone for item in one]

    def gather_to_main(self, items: Sequence[T]) -> list[T]:
        """Every process's items, in rank order, in the main process; empty in the others. In the main thread only."""
        if self.size == 1:
            return list(items)
        everyone: list[Any] | None = [None] * self.size if self.is_main else None
        torch.distributed.gather_object(list(items), everyone)
        return [item for one in everyone or [] for item in one]

    def broadcast_object(self, item: T) -> T:
        """The main process's item."""
        if self.size == 1:
            return item
        box: list[Any] = [item]
        torch.distributed.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self._group:
            return any(self.gather_objects([flag]))
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def sum(self, value: Tensor) -> Tensor:
        """The sum over processes, on the device. In the main thread only."""
        return self.accelerator.reduce(value, reduction="sum") if self.size > 1 else value

    def sum_over_dp(self, value: Tensor) -> Tensor:
        """The sum over data-parallel ranks of a value that is equal in all processes of a rank."""
        total = self.sum(value)
        return total / self.context_parallel.size if self.context_parallel else total

    def max(self, value: Tensor) -> Tensor:
        """The elementwise maximum over processes, on the device. In the main thread only."""
        if self.size == 1:
            return value
        largest = value.clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return largest

    def close(self) -> None:
        self.accelerator.end_training()


def parallel_of(hardware: Hardware, accelerator: Accelerator) -> Parallel:
    """The class for `hardware.parallel`; its base if there is only one process."""
    if accelerator.num_processes == 1:
        return Parallel(accelerator.device)
    if hardware.parallel == "fsdp2":
        from grpocli.distributed.fsdp2 import Fsdp2

        return Fsdp2(accelerator)
    if hardware.parallel == "zero3":
        from grpocli.distributed.zero import Zero3

        return Zero3(accelerator)
    return Ddp(accelerator)
