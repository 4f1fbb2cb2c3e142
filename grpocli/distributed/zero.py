"""hardware.parallel=zero3: DeepSpeed's ZeRO-3 (arXiv 1910.02054)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from grpocli.distributed.parallel import Make, Parallel, loss_scaler

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from grpocli.distributed.sharded_safetensors import StoredTensor


class Zero3(Parallel):
    """Every process has a shard of the float32 weights, of their gradients and of the optimizer's state.

    DeepSpeed's engine is made directly: accelerate's takes the optimizer step in the backward, by its own count of
    micro-batches, and has a fixed limit for gradient clipping.
    """

    replicated = False

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device)
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        if self.device.type == "cpu":  # use gloo: DeepSpeed would compile a transport through shared memory
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.deepspeed: Any = deepspeed

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """DeepSpeed's config. Without `torch_autocast` it would switch autocast off."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # each backward gets whether it is the last
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "torch_autocast": {"enabled": dtype != torch.float32, "dtype": str(dtype).removeprefix("torch.")},
            "steps_per_print": 2**31,
        }

    @contextmanager
    def loading(self) -> Iterator[None]:
        """transformers creates sharded models at once, and copies into them from mapped files."""
        from transformers.integrations import HfDeepSpeedConfig
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        hf_config = HfDeepSpeedConfig(self.config(torch.float32))  # in effect as long as it lives
        yield
        unset_hf_deepspeed_config()
        del hf_config

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        optimizer = make(model)
        engine, optimizer, _, _ = self.deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config(dtype), dist_init_required=False
        )
        self.scaler = loss_scaler(self.device, dtype)
        optimizer.torch_autocast_gradscaler = None  # its scale does not fall, and clipping does not know it
        self.overflow_flag = torch.optim.SGD([torch.nn.Parameter(torch.zeros((), device=self.device))], lr=0.0)
        return engine, optimizer

    def prepare_frozen(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        self.deepspeed.initialize(
            model=model.requires_grad_(False), config=self.config(dtype), dist_init_required=False
        )
        return model

    def autocast(self, model: torch.nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Autocast without its cache, which would hold all weights."""
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)

    def accumulating(self, wrapped: Any, last: bool) -> AbstractContextManager[Any]:
        wrapped.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, wrapped: Any, loss: Tensor) -> None:
        if self.scaler.is_enabled() and wrapped.optimizer.external_loss_scale is None:
            wrapped.optimizer.override_loss_scale(self.scaler.scale(torch.ones((), device=self.device)).item())
        wrapped.backward(loss * self.size)  # DeepSpeed averages

    def update(self, wrapped: Any, optimizer: Any, rate: float, limit: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.clip_grad = limit
        wrapped.step()
        norm = torch.as_tensor(wrapped.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        if self.scaler.is_enabled():
            # DeepSpeed has unscaled or skipped by itself; torch's scaler finds out by the gradient of a flag
            self.overflow_flag.param_groups[0]["params"][0].grad = norm.clone()
            self.scaler.step(self.overflow_flag)
            self.scaler.update()
            optimizer.override_loss_scale(self.scaler.get_scale())
        return norm

    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        named: Iterator[tuple[str, Any]] = model.named_parameters()
        for name, parameter in named:
            if parameter.ds_status.name == "AVAILABLE":  # a forward has kept it, rounded to 16 bits
                parameter.partition()
            with self.deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    def moments(self, optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, value in optimizer.optimizer.state.get(optimizer.fp32_partitioned_groups_flat[0], {}).items():
            if value.numel() == 1:  # a counter
                yield name, value.clone()
            else:
                yield name, safe_get_full_optimizer_state(parameter, name)

    def restore_moments(self, optimizer: Any, parameter: Any, moments: dict[str, StoredTensor]) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        state = optimizer.optimizer.state
        for flat in optimizer.fp32_partitioned_groups_flat:  # this process's shard of each parameter group
            if flat not in state and moments:
                state[flat] = {
                    name: torch.zeros_like(flat) if stored.shape else stored.whole().to(self.device)  # a counter
                    for name, stored in moments.items()
                }
        size = parameter.ds_tensor.numel()
        for name, stored in moments.items():
            if stored.shape:  # DeepSpeed pads the last shards to the size of the others
                part = stored.flat(size * self.rank, size * (self.rank + 1)).to(self.device)
                padded = torch.nn.functional.pad(part, (0, size - part.numel()))
                safe_set_local_optimizer_state(parameter, padded, name)
