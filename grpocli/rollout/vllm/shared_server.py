"""The server of `grpocli vllm-serve`: as `engine=vllm` would start it, but in the foreground and for several runs."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpocli.config.parts import interpolate, one_of, part, require
from grpocli.errors import ConfigError, EngineError
from grpocli.processes.signals import handle_stops, restore
from grpocli.progress import Progress, unreported
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.server_log import failure_cause, fresh_log, printed_log
from grpocli.types import DTYPES

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpocli.processes.guard import Guarded
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.server_files import Endpoint

SHORT = (
    *("tensor_parallel", "data_parallel", "max_model_len", "gpu_memory_utilization", "enforce_eager"),
    *("quantization", "speculative", "cpu_kv_cache_gb"),
)
"""Keys of `engine=vllm` with a short name here; each follows `engine.NAME`, so both names work."""
NOT_HERE = {
    "base_url": "it is the address of a server that runs already",
    "api_key_file": "the server makes a new key and prints its file",
    "replicas": "each command starts one server; start another one with another port",
    "port": "set port",
}
"""Keys of `engine=vllm` that only runs use, with the reason."""


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
        for field in dataclasses.fields(Vllm):
            if field.name in NOT_HERE and getattr(self.engine, field.name) != field.default:
                value = getattr(self.engine, field.name)
                raise ConfigError(
                    f"not for vllm-serve: {NOT_HERE[field.name]}", key=f"engine.{field.name}", value=value
                )
        require(self, "host", bool(self.host), "must be an address of this machine, such as 127.0.0.1")
        require(self, "port", 0 <= self.port < 65536, "must be 0 (any free port) to 65535")
        require(self, "seed", self.seed >= 0, "must be 0 or more")
        require(self, "lora_rank", (self.lora_rank or 0) >= 0, "must be 0 (no adapters) or more")
        if self.dtype is not None:
            one_of(self, "dtype", ("auto", *DTYPES))
        self.options()

    def options(self) -> Vllm:
        """The engine's options with the short keys. Raises ConfigError, naming a short key, for an invalid value."""
        given = {name: value for name in SHORT if (value := getattr(self, name)) is not None}
        try:
            options: Vllm = dataclasses.replace(self.engine, **given)
        except ConfigError as error:
            raise error.with_key(error.key.removeprefix("engine.")) from error
        return options

    def job(self, model_path: str, dtype: str, served_path: str | None = None) -> EngineJob:
        """The engine job that all runs of this server share. served_path: see `EngineJob`."""
        from grpocli.models.loading import choose_head_dtype, language_model_class
        from grpocli.rollout.engine import EngineJob
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


def build_server_config(config: DictConfig) -> Serve:
    """Build the settings. Raises ConfigError, also for another engine than vLLM."""
    from grpocli.config.build import build

    if "vllm_args" not in config.engine:  # before the keys that follow engine.NAME fail
        raise ConfigError("vllm-serve serves with engine=vllm; leave it out", key="engine")
    made: Serve = build(config)
    return made


def serve(
    config: Serve,
    model_path: str,
    dtype: str,
    progress: Progress = unreported,
    ready: Callable[[], None] = lambda: None,
    served_path: str | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, then remove all files. Returns the exit code, 0. After an error the log stays.

    model_path: a folder or hub id. dtype: one of DTYPES, resolved from `config.dtype`.
    served_path: see `EngineJob`. progress: called during the start. ready: called when the server answers.
    Raises ConfigError for a busy port, EngineError if the server ends by itself.
    """
    from grpocli.rollout.vllm.server import ServerSpec, check_port, free_port, serving
    from grpocli.rollout.vllm.server_files import serve_file

    port, options = config.port or free_port(), config.options()
    job = config.job(model_path, dtype, served_path)
    spec = ServerSpec(job, port, options.max_model_len, host=config.host, port_key="port")
    record = serve_file(port)
    log = record.with_suffix(".log")
    check_port(spec.host, spec.port, spec.port_key)  # before the log of a server that uses the port is changed
    with (
        contextlib.suppress(KeyboardInterrupt),
        _interrupted_by_term(),
        fresh_log(log),
        printed_log(log) if config.verbose else contextlib.nullcontext(),
        serving(spec, options, log, remove=[record], progress=progress) as (endpoint, process),
    ):
        description = served(endpoint)
        try:
            endpoint.save(record)
            ready()
            print(how_to_use(endpoint, record, job, description), flush=True)
            _wait(process, log)
        finally:
            record.unlink(missing_ok=True)
    print("vllm-serve: stopped", flush=True)
    return 0


def _wait(process: Guarded, log: Path) -> None:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(3600)
            raise EngineError(f"the vLLM server ended by itself with exit code {code}{failure_cause(log)}")


@contextlib.contextmanager
def _interrupted_by_term() -> Iterator[None]:
    """Make every stopping signal act like Ctrl-C, once, so that a second one does not interrupt the cleanup."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handle_stops(signal.SIG_IGN)
        raise KeyboardInterrupt

    before = handle_stops(interrupt)
    try:
        yield
    finally:
        restore(before)


def served(endpoint: Endpoint) -> dict[str, Any]:
    """vLLM's version and its description of the model that it serves."""
    from grpocli.rollout.vllm.client import ServerClient

    client = ServerClient(endpoint, timeout=60)
    config = client.get("/server_info?config_format=json")["vllm_config"]
    return {"version": client.get("/version")["version"], **config["model_config"]}


def how_to_use(endpoint: Endpoint, record: Path, job: EngineJob, description: dict[str, Any]) -> str:
    """The printed description of the server, and the overrides with which runs use it.

    record: the file with the key. description: see `served`.
    """
    from grpocli.models.loading import ModelPart

    rank, shm = job.lora_rank, job.transport == "shm"
    head = job.head_dtype or "null"
    facts = {
        "vLLM": description["version"],
        "model": job.model_path,
        "dtype": f"{job.dtype} (the run's model.dtype must be the same)",
        **({} if job.dtype == "float32" else {"head_dtype": f"{head} (the run's model.head_dtype must be the same)"}),
        "max_model_len": f"{description['max_model_len']} tokens of prompt and completion",
        "weights": f"sync={job.transport}" + (f", through {endpoint.shm_dir}" if shm else ""),
        "adapters": f"up to rank {rank} (the run's model.lora.rank)" if rank else "none: runs send all weights",
        "key": f"{record} (mode 0600; a run on this machine finds it)",
        **({"log": f"{endpoint.log} (verbose=true prints it)"} if endpoint.log else {}),
    }
    other_head = job.dtype != "float32" and job.head_dtype != ModelPart().head_dtype
    choices = [f"model.head_dtype={head}"] * other_head
    choices += [f"model.lora.rank={rank}"] * bool(rank) + [f"sync={job.transport}"] * (not shm)
    port = urlsplit(endpoint.url).port
    return "\n".join(
        [
            f"\nvLLM serves at {endpoint.url}",
            *(f"  {name:<15}{fact}" for name, fact in facts.items()),
            "train with it, with the same model=:",
            "  " + " ".join(["grpocli train engine=vllm", f"engine.base_url={endpoint.url}", *choices]),
            "from another machine, where this one serves with host=0.0.0.0:",
            f"  engine.base_url=http://THIS_MACHINE:{port} engine.api_key_file=COPY_OF_THE_KEY",
            *(["  and here and there sync=shm sync.folder=A_FOLDER_THAT_BOTH_SEE"] if shm else []),
            "stop with Ctrl-C\n",
        ]
    )
