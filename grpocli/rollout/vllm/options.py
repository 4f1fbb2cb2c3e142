"""engine=vllm: a vLLM server generates; started, watched and stopped by the run, or given by its address."""

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
        *("api_key", "host", "middleware", "model", "port", "served_model_name", "uds"),
        *("dtype", "enable_prefix_caching", "generation_config", "logprobs_mode", "max_model_len", "seed"),
        "weight_transfer_config",
    }
)
"""Options of vLLM that the run sets itself, because its correctness or safety rests on them."""


@part("engine", "vllm")
class Vllm:
    """A vLLM server: the run's own, or the one at `base_url` (started with `grpocli vllm-serve`).

    base_url: e.g. http://127.0.0.1:8000; null starts a server.
    api_key_file: holds that server's key; null finds the one that `grpocli vllm-serve` wrote on this machine, then
        the environment's VLLM_API_KEY.
    replicas: servers of the run's own, which share the prompts. port: of the first of them, on 127.0.0.1 (the others
        follow); 0 takes free ones.
    start_timeout: seconds until a server must answer. request_timeout: seconds for one answer.
    max_restarts: how often a server of the run's own that dies is started again. reconnect_timeout: seconds for which
        a given server that went away is waited for.
    gpu_memory_utilization: share of a GPU's memory that vLLM may take. cpu_kv_cache_gb: GiB for its cache on a CPU.
    tensor_parallel: GPUs that share one model. data_parallel: copies of it in one server.
    max_model_len: null takes what the run needs.
    enforce_eager: no compilation; null means on a CPU. quantization, speculative: as vLLM takes them.
    vllm_args: any other option of vLLM's server: `engine.vllm_args.max_num_seqs=64`.
    """

    base_url: Any = None
    api_key_file: Any = None
    replicas: int = 1
    port: int = 0
    start_timeout: int = 600
    request_timeout: int = 600
    max_restarts: int = 2
    reconnect_timeout: int = 300
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gb: int = 1
    tensor_parallel: int = 1
    data_parallel: int = 1
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    quantization: str | None = None
    speculative: dict[str, Any] | None = None
    vllm_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        url = self.base_url
        require(
            self,
            "base_url",
            url is None or url.startswith(("http://", "https://")),
            "must start with http://",
        )
        require(self, "port", 0 <= self.port < 65536, "must be 0 (any free port) to 65535")
        for field in (
            "start_timeout",
            "request_timeout",
            "cpu_kv_cache_gb",
            "tensor_parallel",
            "data_parallel",
            "replicas",
        ):
            require(self, field, getattr(self, field) >= 1, "must be at least 1")
        require(self, "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "must be above 0, at most 1")
        require(self, "max_model_len", self.max_model_len is None or self.max_model_len > 1, "must be above 1")
        for name in self.vllm_args:
            if name.replace("-", "_") in OURS:
                raise ConfigError(
                    f"{key_of(self, 'vllm_args')}.{name}: grpocli sets this itself{nearest(name, self._fields())}"
                )

    def _fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if field.name != "vllm_args"]

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        """Start a server, or check the given one. Raises ConfigError where it cannot work."""
        from grpocli.rollout.vllm.launch import launch

        return launch(self, job)

    def connect(self, context: EngineContext) -> Engine:
        from grpocli.rollout.vllm.engine import connect

        return connect(self, context)
