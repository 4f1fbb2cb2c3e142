"""A vLLM server process: its command line, its environment, its start and its end (`serving`)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from grpocli.errors import ConfigError, EngineError
from grpocli.processes.guard import Guarded, guarded
from grpocli.processes.node import GROUP_VARIABLES
from grpocli.processes.threads import run_in_thread
from grpocli.progress import Progress, unreported
from grpocli.rollout.vllm.api_server import KEY_VARIABLE, PRIVATE_FOLDER_VARIABLE
from grpocli.rollout.vllm.client import MODEL, ServerClient
from grpocli.rollout.vllm.lora import lora_flags
from grpocli.rollout.vllm.plugin import BACKENDS
from grpocli.rollout.vllm.server_files import POLL, Endpoint, log_lines, private_folder
from grpocli.rollout.vllm.transports import WEIGHTS_FOLDER_VARIABLE
from grpocli.text import shorten

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import CommonOptions, VllmOptions

HF_OVERRIDES = "hf_overrides"
"""vLLM's option for entries of a model's config, among them the dtype of its output head."""
LOOPBACK = "127.0.0.1"
SHOWN = 80
"""Most characters of the log's last line that are shown during a start."""
FIRST_REQUEST = [0] * 8
"""Token ids that a new server scores while the trainer loads, so that no sync waits for what vLLM compiles then."""
LONGEST_SOCKET_FOLDER = 107 - 37  # bytes: the kernel's limit for a socket's path, less vLLM's file name
LAUNCHER_VARIABLES = (*GROUP_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
"""Set by accelerate's launcher for trainer processes; vLLM would take them for its own."""
UNSAFE_VARIABLES = (
    "VLLM_ALLOW_INSECURE_SERIALIZATION",  # pickles over HTTP
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",  # completions in the log
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_USE_RUST_FRONTEND",  # takes no middleware, so no route would need the key
)
"""Variables of the user's environment that a server does not get."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The job of a server, and its address."""

    job: EngineJob
    port: int
    max_model_len: int | None = None
    """Tokens of context; None takes the model's own."""
    host: str = LOOPBACK
    gpus: str | None = None
    """CUDA_VISIBLE_DEVICES for the server; None: this process's."""


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def common_options(options: CommonOptions, job: EngineJob, model_path: str, cpu: bool) -> dict[str, Any]:
    """vLLM's options that a server and the in-process engine share."""
    return {
        "dtype": job.dtype,
        HF_OVERRIDES: hf_overrides(options, job),
        "seed": job.seed,
        "trust_remote_code": job.trust_remote_code,
        "quantization": options.quantization,
        "max_num_seqs": max_num_seqs_option(job.max_num_seqs, cpu),
        "enforce_eager": cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_prefix_caching": caches_prefixes(model_path, cpu),
        "enable_chunked_prefill": False if cpu else None,  # with seeds, chunked prompts crash vLLM on a CPU
        "generation_config": "vllm",  # otherwise the model's folder may change sampling
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that is sampled from
    }


def command(spec: ServerSpec, options: VllmOptions, cpu: bool) -> list[str]:
    """The server's command line, without the key, because any user may list processes."""
    job = spec.job
    revision = None if job.served_path else job.revision
    given: dict[str, Any] = {
        **common_options(options, job, job.served, cpu),
        "model": job.served,
        "served_model_name": MODEL,
        "host": spec.host,
        "port": spec.port,
        "revision": revision,
        "tokenizer_revision": revision,
        "load_format": "dummy" if job.dummy else None,
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": options.tensor_parallel,
        "data_parallel_size": None if options.data_parallel == 1 else options.data_parallel,
        "gpu_memory_utilization": None if cpu else options.memory_share(job.shares_gpus),
        "weight_transfer_config": {"backend": BACKENDS[job.transport]},
        "enable_scale_out": True,  # token ids in, token ids out
        "scheduling_policy": "priority",  # the probe goes before waiting requests
        "disable_uvicorn_access_log": True,
        "middleware": "grpocli.rollout.vllm.api_server.RequireKey",
        **lora_flags(job.lora_rank, job.dtype, cpu),
    }
    others = {name: value for name, value in options.vllm_args.items() if name.replace("-", "_") != HF_OVERRIDES}
    # -P: do not import from the current folder
    start = [sys.executable, "-P", "-m", "grpocli.rollout.vllm.api_server"]
    return [*start, *(word for one in (*given.items(), *others.items()) for word in option_words(*one))]


def option_words(name: str, value: Any) -> list[str]:
    """The words of an option on vLLM's command line; none for None. vLLM refuses unknown options when it starts."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list):
        return [f"--{flag}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in value)]
    return [f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def hf_overrides(options: CommonOptions, job: EngineJob) -> dict[str, Any] | None:
    """vLLM's option with which it has the trainer's class and dtype of the output head; None if it is not needed.

    The user's entries stay. The model's config may ask vLLM for another dtype, so the trainer's is always named.
    """
    served = {"architectures": [job.architecture]} if job.architecture else {}
    head = {} if job.dtype == "float32" else {"head_dtype": job.head_dtype or "model"}
    return {**served, **(options.option(HF_OVERRIDES) or {}), **head} or None


def caches_prefixes(model_path: str, cpu: bool) -> bool:
    """Whether vLLM can keep the prompts of a model in a folder.

    Its cache of recurrent and convolutional states needs prompts in chunks, which are off on a CPU.
    """
    file = Path(model_path) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    kinds = config.get("layer_types") or config.get("text_config", {}).get("layer_types") or []
    return not cpu or all(kind.endswith("_attention") and not kind.startswith("linear") for kind in kinds)


def max_num_seqs_option(max_num_seqs: int, cpu: bool) -> int | None:
    """vLLM's option for requests of so many completions, which it refuses above `max_num_seqs`; None: its default.

    The default on a GPU is 256, or 1,024 on a large one, which the option must not lower. A small one gets 1,024, too.
    """
    if max_num_seqs <= (128 if cpu else 256):
        return None
    return max_num_seqs if cpu else max(max_num_seqs, 1024)


def environment(
    key: str, shm_dir: Path, own: Path, options: VllmOptions, transport: str = "shm", lora: bool = False
) -> dict[str, str]:
    """This process's environment, without unsafe and confusing variables. own: the server's private folder."""
    env = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, *UNSAFE_VARIABLES)}
    if plugins := env.get("VLLM_PLUGINS"):
        env["VLLM_PLUGINS"] = f"{plugins},grpocli"
    # with sync=nccl the trainer joins from another process, maybe on another machine, so NCCL stays reachable
    sockets = ["GLOO_SOCKET_IFNAME"] + ["NCCL_SOCKET_IFNAME"] * (transport != "nccl")
    loopback = dict.fromkeys(sockets, "lo") if Path("/sys/class/net/lo").exists() else {}
    return (
        loopback
        | {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}  # waiting processes sleep, see `plugin.wait_asleep`
        | env
        | {
            KEY_VARIABLE: key,
            WEIGHTS_FOLDER_VARIABLE: str(shm_dir),
            PRIVATE_FOLDER_VARIABLE: str(own),
            **({"VLLM_RPC_BASE_PATH": str(own)} if len(os.fsencode(own)) <= LONGEST_SOCKET_FOLDER else {}),
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if lora else {}),  # for clients with the key
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_kv_cache_gb),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK,  # its processes communicate on this machine only
        }
    )


@contextlib.contextmanager
def serving(
    spec: ServerSpec,
    options: VllmOptions,
    log: Path,
    stop_event: threading.Event | None = None,
    remove: Sequence[Path] = (),
    progress: Progress = unreported,
) -> Iterator[tuple[Endpoint, Guarded]]:
    """A healthy server while the block runs; its processes and files are removed afterwards.

    stop_event: once set, a start under way raises EngineError. remove: further files to remove with the server, even if
    this process is killed. progress: gets the log's last line during the start, which may fail as `wait_healthy` does.
    """
    cpu, key = on_cpu(), secrets.token_urlsafe(32)
    words = command(spec, options, cpu)  # may raise, so before any folder is made
    shm_dir = Path(spec.job.sync_folder).expanduser().absolute() if spec.job.sync_folder else None
    if shm_dir:
        shm_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    log_from = log.stat().st_size if log.exists() else 0
    with private_folder() as own:
        env = environment(key, shm_dir or own.path, own.path, options, spec.job.transport, lora=spec.job.lora_rank > 0)
        if spec.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = spec.gpus
        files = [*remove, own.path]
        with guarded(words, name="vllm", env=env, log=log, remove=files, hold=[own.lock]) as process:
            url = address(spec.host, spec.port)
            endpoint = Endpoint(url, key, str(shm_dir or own.path), str(log), log_from=log_from)
            wait_healthy(process, endpoint, log, options.start_timeout, stop_event, progress)
            client = ServerClient(endpoint, options.request_timeout)
            run_in_thread(lambda: client.score(FIRST_REQUEST), "first request")
            yield endpoint, process


def wait_healthy(
    process: Guarded,
    endpoint: Endpoint,
    log: Path,
    timeout: float,
    stop_event: threading.Event | None = None,
    progress: Progress = unreported,
) -> None:
    """Wait until the server answers and accepts the key, which another server on its port would not.

    Raises EngineError after `timeout` seconds or if the process ends first, ConfigError if vLLM refuses an option.
    """
    deadline = time.monotonic() + timeout
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, trust_env=False, verify=False, timeout=5) as http:
        while True:
            if (code := process.poll()) is not None:
                problem = f"the vLLM server ended with exit code {code} while it started{endpoint.cause()}"
                if endpoint.refuses_an_option():
                    raise ConfigError(problem, key="engine.vllm_args")
                raise EngineError(problem)
            with contextlib.suppress(httpx.HTTPError):
                if http.get("/health").is_success and http.get("/weight_info").is_success:
                    return
            progress(0, 0, "vLLM starts", shorten(" ".join(log_lines(log, endpoint.log_from)[-1:]), SHOWN))
            if stop_event and stop_event.is_set():
                raise EngineError("the run ended while the vLLM server started")
            if time.monotonic() > deadline:
                problem = f"the vLLM server did not answer /health within {timeout:g} s (engine.start_timeout)"
                raise EngineError(f"{problem}{endpoint.cause()}")
            time.sleep(POLL)


def address(host: str, port: int) -> str:
    """The URL of a server that listens on `host`."""
    reach = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reach}:{port}"


def free_port() -> int:
    """A free port. Another process may take it before the server listens there; `supervisor.py` then tries another."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the port is taken or the host is not an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"cannot listen there on {host} ({error.strerror}): choose another port"
            raise ConfigError(problem, key="port", value=port) from error
