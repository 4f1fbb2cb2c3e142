"""hardware.parallel=zero2 and zero3: DeepSpeed's ZeRO (arXiv 1910.02054)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from grpocli.distributed.parallel import Make, Parallel, loss_scaler
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from grpocli.distributed.sharded_safetensors import StoredTensor


class Zero2(Parallel):
    """Every process has all float32 weights, and a shard of the gradients and of the optimizer's state.

    DeepSpeed's engine is made directly: accelerate's takes the optimizer step in the backward, by its own count of
    micro-batches, and has a fixed limit for gradient clipping.
    """

    stage, replicated = 2, False

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device)
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.deepspeed = _deepspeed(self.stage, self.device)

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """DeepSpeed's config. Without `torch_autocast` it would switch autocast off."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # each backward gets whether it is the last
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "torch_autocast": {"enabled": dtype != torch.float32, "dtype": str(dtype).removeprefix("torch.")},
            "steps_per_print": 2**31,
        }

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype, make: Make) -> tuple[torch.nn.Module, Any]:
        optimizer = make(model)
        engine, optimizer, _, _ = self.deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config(dtype), dist_init_required=False
        )
        self.scaler = loss_scaler(self.device, dtype)
        optimizer.torch_autocast_gradscaler = None  # its scale does not fall, and clipping does not know it
        self.overflow_flag = torch.optim.SGD([torch.nn.Parameter(torch.zeros((), device=self.device))], lr=0.0)
        return engine, optimizer

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

    def moments(self, optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        kept = optimizer.optimizer.state.get(self._flat(optimizer)[0], {})
        self._link(optimizer)
        for name, value in kept.items():
            if value.numel() == 1:  # a counter
                yield name, value.clone()
            else:
                yield name, safe_get_full_optimizer_state(parameter, name)

    def restore_moments(self, optimizer: Any, parameter: torch.nn.Parameter, moments: dict[str, StoredTensor]) -> None:
        state = optimizer.optimizer.state
        for flat in self._flat(optimizer):
            if flat not in state and moments:
                state[flat] = {
                    name: torch.zeros_like(flat) if stored.shape else stored.whole().to(self.device)  # a counter
                    for name, stored in moments.items()
                }
        self._link(optimizer)
        for name, stored in moments.items():
            if stored.shape:
                self._set(parameter, name, stored)

    def _flat(self, optimizer: Any) -> list[Tensor]:
        """This process's shard of each parameter group, flattened: the tensors that the optimizer has."""
        flat: list[Tensor] = optimizer.single_partition_of_fp32_groups
        return flat

    def _link(self, optimizer: Any) -> None:
        """Link optimizer states to parameters again: DeepSpeed 0.19 misses all groups but the first."""
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()

    def _set(self, parameter: Any, name: str, stored: StoredTensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if parameter._hp_mapping is not None:  # some of it is in this process's shard
            safe_set_full_optimizer_state(parameter, stored.whole().to(self.device), name)


class Zero3(Zero2):
    """Weights are sharded, too; those of a layer are gathered for its forward and its backward."""

    stage = 3

    @contextmanager
    def loading(self) -> Iterator[None]:
        """transformers creates sharded models at once, and copies into them from mapped files."""
        from transformers.integrations import HfDeepSpeedConfig
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        hf_config = HfDeepSpeedConfig(self.config(torch.float32))  # in effect as long as it lives
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
            del hf_config

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

    def sampling(self, model: torch.nn.Module, dtype: torch.dtype) -> NoReturn:
        raise ConfigError(
            "engine=transformers cannot sample from sharded weights: take engine=vllm, or hardware.parallel=fsdp2",
            key="hardware.parallel",
            value="zero3",
        )

    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        named: Iterator[tuple[str, Any]] = model.named_parameters()
        for name, parameter in named:
            if parameter.ds_status.name == "AVAILABLE":  # a forward has kept it, rounded to 16 bits
                parameter.partition()
            with self.deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    def _flat(self, optimizer: Any) -> list[Tensor]:
        flat: list[Tensor] = optimizer.fp32_partitioned_groups_flat
        return flat

    def _link(self, optimizer: Any) -> None:
        """ZeRO-3 links states on access."""

    def _set(self, parameter: Any, name: str, stored: StoredTensor) -> None:
        """DeepSpeed pads the last shards to the size of the others."""
        from deepspeed.utils import safe_set_local_optimizer_state

        size = parameter.ds_tensor.numel()
        part = stored.flat(size * self.rank, size * (self.rank + 1)).to(self.device)
        safe_set_local_optimizer_state(parameter, torch.nn.functional.pad(part, (0, size - part.numel())), name)


def _deepspeed(stage: int, device: torch.device) -> Any:
    """The library, set up for this device. Raises ConfigError if it is not installed."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"needs DeepSpeed ({error}): pip install deepspeed, or take hardware.parallel=fsdp2",
            key="hardware.parallel",
            value=f"zero{stage}",
        ) from error
    if device.type == "cpu":  # use gloo: DeepSpeed would compile a transport through shared memory
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
