"""The keys of engine=vllm, and their checks."""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import urlsplit

from grpocli.config.parts import key_of, nearest, require, section
from grpocli.errors import ConfigError

STOPPING = 60
"""Seconds in which a server that is stuck is surely ended."""
OURS = frozenset(
    {
        *("api_key", "api_server_count", "config", "grpc", "grpc_port", "headless", "host", "middleware", "root_path"),
        *("model", "model_tag", "port", "served_model_name", "ssl_certfile", "ssl_keyfile", "tokens_only", "uds"),
        *("enable_prefix_caching", "enable_scale_out", "generation_config", "logprobs_mode", "weight_transfer_config"),
        "scheduling_policy",
        *("enable_lora", "lora_modules", "lora_target_modules", "max_cpu_loras", "max_lora_rank", "max_loras"),
    }
)
"""Options of vLLM that grpocli sets itself, because a run's correctness or safety rests on them."""
ELSEWHERE = {
    "data_parallel_size": "engine.data_parallel",
    "dtype": "model.dtype",
    "revision": "model.revision",
    "seed": "seed",
    "speculative_config": "engine.speculative",
    "tensor_parallel_size": "engine.tensor_parallel",
    "trust_remote_code": "model.trust_remote_code",
}
"""Options of vLLM that are keys of their own, under another name."""
OF_ITS_START = ("replicas", "port", "tensor_parallel", "data_parallel", "quantization", "speculative", "vllm_args")
"""Keys that say nothing of a server that runs already, and would be ignored without a word."""


@section("engine")
class VllmOptions:
    """The keys of `engine=vllm`.

    base_url: e.g. http://127.0.0.1:8000, or a list of several; null starts a server.
    api_key_file: holds that server's key (one for all, or a list with one for each); null finds the one that
        `grpocli vllm-serve` wrote on this machine, then the environment's VLLM_API_KEY.
    replicas: servers of the run's own, which share the prompts. port: of the first of them, on 127.0.0.1 (the others
        follow); 0 takes free ones.
    start_timeout: seconds until a server must answer. request_timeout: seconds after which a server that neither
        answers a request nor computes a token counts as stuck; no answer may take ten times as long.
    max_restarts: how often a server of the run's own that dies is started again. reconnect_timeout: seconds for which
        a given server that went away is waited for. patience: seconds for which one that answers that it is busy (429,
        503), or fails (500), is asked again.
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
    patience: int = 120
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gb: int = 1
    tensor_parallel: int = 1
    data_parallel: int = 1
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    quantization: str | None = None
    speculative: dict[str, Any] = dataclasses.field(default_factory=dict)
    vllm_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_given()
        require(self, "port", 0 <= self.port < 65536, "must be 0 (any free port) to 65535")
        at_least_1 = ("start_timeout", "request_timeout", "reconnect_timeout", "patience", "cpu_kv_cache_gb")
        for field in (*at_least_1, "tensor_parallel", "data_parallel", "replicas"):
            require(self, field, getattr(self, field) >= 1, "must be at least 1")
        require(self, "max_restarts", self.max_restarts >= 0, "must be 0 (never) or more")
        require(self, "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "must be above 0, at most 1")
        require(self, "max_model_len", self.max_model_len is None or self.max_model_len > 1, "must be above 1")
        require(
            self,
            "port",
            self.port == 0 or self.port + self.replicas <= 65536,
            f"leaves no room for {self.replicas} servers, which take the ports from there on: take a lower one",
        )
        self._check_vllm_args()

    @property
    def urls(self) -> list[str]:
        """The given servers, without a slash at the end; none where the run starts its own."""
        given = [self.base_url] if isinstance(self.base_url, str) else self.base_url or []
        return [url.removesuffix("/") for url in map(str, given)]

    def key_file(self, url: str) -> str | None:
        """Where the key of one of `urls` is, if the config says so."""
        files = self.api_key_file
        named = files[self.urls.index(url)] if isinstance(files, list | tuple) else files
        return None if named is None else str(named)

    @property
    def waits(self) -> dict[str, int]:
        """Seconds for which a server that was lost is waited for at most, by the keys they come from."""
        if self.base_url is not None:
            return {"engine.reconnect_timeout": self.reconnect_timeout, "engine.patience": self.patience}
        return {
            "engine.start_timeout times engine.max_restarts": self.start_timeout * max(1, self.max_restarts) + STOPPING
        }

    def _check_given(self) -> None:
        """The keys that belong to `base_url`."""
        if self.base_url is None:
            return
        require(self, "base_url", isinstance(self.base_url, str | list | tuple), "must be an address or a list of them")
        urls = self.urls
        require(self, "base_url", bool(urls), "names no server: give an address, or null to start one")
        for url in urls:
            if not _is_address(url):
                problem = "must be an address such as http://127.0.0.1:8000"
                raise ConfigError(problem, key=key_of(self, "base_url"), value=url)
        twice = sorted({url for url in urls if urls.count(url) > 1})
        require(self, "base_url", not twice, f"names {', '.join(twice)} twice: each server once")
        require(
            self,
            "api_key_file",
            not isinstance(self.api_key_file, list | tuple) or len(self.api_key_file) == len(urls),
            f"has another length than engine.base_url ({len(urls)}): give one file for each server, or one for all",
        )
        defaults = {field.name: field for field in dataclasses.fields(self)}
        for name in OF_ITS_START:
            default = {} if defaults[name].default_factory is dict else defaults[name].default
            problem = "does not change a server that runs already: give it to `grpocli vllm-serve`, or unset base_url"
            require(self, name, getattr(self, name) == default, problem)

    def _check_vllm_args(self) -> None:
        for name in self.vllm_args:
            key, option = f"{key_of(self, 'vllm_args')}.{name}", name.replace("-", "_")
            own = f"engine.{option}" if option in self._fields() else ELSEWHERE.get(option)
            if own:
                raise ConfigError(f"{key}: is a key of its own: set {own}")
            if option in OURS:
                raise ConfigError(f"{key}: grpocli sets this itself, since a run's correctness or safety rests on it")

    def _fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if field.name != "vllm_args"]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


COLOCATED = frozenset(
    {
        *("model", "dtype", "seed", "revision", "trust_remote_code", "skip_tokenizer_init", "enable_lora"),
        *("enable_prefix_caching", "generation_config", "logprobs_mode", "weight_transfer_config", "load_format"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"),
        *("enable_sleep_mode", "kv_cache_memory_bytes"),
    }
)
"""Arguments of vLLM that the run sets itself: they follow from other keys, or its correctness rests on them."""


@section("engine")
class ColocateOptions:
    """The keys of `engine=vllm_colocate`.

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
            if name in COLOCATED or name in own:
                raise ConfigError(f"{key_of(self, 'vllm_args')}.{name}: grpocli sets this itself{nearest(name, own)}")
