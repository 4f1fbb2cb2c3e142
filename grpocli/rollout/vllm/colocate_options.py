"""engine=vllm_colocate: vLLM in the trainer's own process, on the trainer's own devices."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import key_of, nearest, part, require
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.rollout.engine import Engine, EngineContext, EngineJob

OURS = frozenset(
    {
        *("model", "dtype", "seed", "revision", "trust_remote_code", "skip_tokenizer_init", "enable_lora"),
        *("enable_prefix_caching", "generation_config", "logprobs_mode", "weight_transfer_config", "load_format"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"),
        *("enable_sleep_mode", "kv_cache_memory_bytes"),
    }
)
"""Arguments of vLLM that the run sets itself: they follow from other keys, or its correctness rests on them."""


@part("engine", "vllm_colocate")
class VllmColocate:
    """An engine in every trainer process, which holds one whole model; weights are loaded from the trainer's directly.

    gpu_memory_utilization: share of a GPU's memory that vLLM may take while it generates, beside the trainer's.
    cpu_kv_cache_gb: GiB for its cache on a CPU, in each trainer process. max_model_len: null takes what the run needs.
    enforce_eager: no compilation; null means on a CPU. quantization: as vLLM takes it.
    sleep: give vLLM's memory back between generations; null means on GPUs.
    vllm_args: any other argument of `vllm.LLM`: `engine.vllm_args.max_num_seqs=64`.
    """

    gpu_memory_utilization: float = 0.3
    cpu_kv_cache_gb: int = 1
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    quantization: str | None = None
    sleep: bool | None = None
    vllm_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self, "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "must be above 0, at most 1")
        require(self, "cpu_kv_cache_gb", self.cpu_kv_cache_gb >= 1, "must be at least 1")
        require(self, "max_model_len", self.max_model_len is None or self.max_model_len > 1, "must be above 1")
        own = [field.name for field in dataclasses.fields(self) if field.name != "vllm_args"]
        for name in self.vllm_args:
            if name in OURS or name in own:
                raise ConfigError(f"{key_of(self, 'vllm_args')}.{name}: grpocli sets this itself{nearest(name, own)}")

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        """Nothing to start; raises ConfigError where it cannot work."""
        from grpocli.rollout.vllm.colocate import launch

        return launch(self, job)

    def connect(self, context: EngineContext) -> Engine:
        from grpocli.rollout.vllm.colocate import connect

        return connect(self, context)
