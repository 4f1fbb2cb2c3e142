"""A vLLM server process: its command line, its environment, its start and its end."""

from __future__ import annotations

import contextlib
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

from grpocli.errors import ConfigError, EngineError
from grpocli.processes.guard import Guarded, guarded
from grpocli.progress import Progress, unreported
from grpocli.rollout.vllm.adapter import lora_environment, lora_flags
from grpocli.rollout.vllm.api_server import FOLDER_VARIABLE as OWN_FOLDER_VARIABLE
from grpocli.rollout.vllm.auth import KEY_VARIABLE
from grpocli.rollout.vllm.endpoint import Endpoint
from grpocli.rollout.vllm.log import StartupLog
from grpocli.rollout.vllm.private_folder import private_folder
from grpocli.rollout.vllm.transport import BACKENDS
from grpocli.rollout.vllm.validate import argument_words, check_arguments, check_head_size, check_plugin, further_words
from grpocli.rollout.vllm.weights import FOLDER_VARIABLE

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import VllmOptions

LOOPBACK = "127.0.0.1"
POLL = 0.2  # seconds between looks at a starting server
LONGEST_SOCKETS = 107 - 37  # of a folder's path: the kernel's limit for a socket, less vLLM's file name
LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)
"""What accelerate's launcher sets for trainer processes; vLLM would take it for its own."""
UNSAFE = (
    "VLLM_ALLOW_INSECURE_SERIALIZATION",  # pickles over HTTP
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",  # completions in the log
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_USE_RUST_FRONTEND",  # which takes no middleware, so nothing would ask for the key
)
"""What a server gets from us or not at all, whatever the user's environment says."""

_choosing = threading.Lock()
_chosen: set[int] = set()  # ports that this process has given out


@dataclass(frozen=True, slots=True)
class Spec:
    """What is served, and where.

    dtype: "float32", "bfloat16" ... max_model_len: None leaves it to vLLM. port_key: what the user calls the port.
    lora_rank: of the adapters that it takes; 0 for none. transport: how its weights come, "shm", "nccl" or "ipc".
    sync_folder: the folder that it reads weights from (None: a new one, which goes with it). revision,
    trust_remote_code: as for the trainer's model. most: completions of one request.
    gpus: CUDA_VISIBLE_DEVICES for it (None: ours).
    """

    model: str
    dtype: str
    seed: int
    port: int
    host: str = LOOPBACK
    max_model_len: int | None = None
    port_key: str = "engine.port"
    lora_rank: int = 0
    transport: str = "shm"
    sync_folder: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    most: int = 1
    gpus: str | None = None

    @classmethod
    def of(cls, job: EngineJob, port: int, max_model_len: int | None, **more: Any) -> Spec:
        """A server for this job, or for jobs like it; `more` are further fields."""
        return cls(
            model=job.model_path,
            dtype=job.dtype,
            seed=job.seed,
            port=port,
            max_model_len=max_model_len,
            lora_rank=job.lora_rank,
            transport=job.transport,
            sync_folder=job.sync_folder,
            revision=job.revision,
            trust_remote_code=job.trust_remote_code,
            most=job.most,
            **more,
        )


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def command(spec: Spec, options: VllmOptions, cpu: bool) -> list[str]:
    """The server's command line. The key is not on it: anyone may list processes."""
    from grpocli.rollout.vllm.protocol import MODEL

    flags: dict[str, Any] = {
        "model": spec.model,
        "served-model-name": MODEL,
        "host": spec.host,
        "port": spec.port,
        "revision": spec.revision,
        "tokenizer-revision": spec.revision,
        "trust-remote-code": spec.trust_remote_code or None,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max-model-len": spec.max_model_len,
        "quantization": options.quantization,
        "speculative-config": options.speculative or None,
        "tensor-parallel-size": options.tensor_parallel,
        "data-parallel-size": None if options.data_parallel == 1 else options.data_parallel,
        "gpu-memory-utilization": None if cpu else options.gpu_memory_utilization,
        "max-num-seqs": sequences(spec.most, cpu),
        "enforce-eager": (cpu if options.enforce_eager is None else options.enforce_eager) or None,
        "enable-prefix-caching": True,
        "enable-chunked-prefill": False if cpu else None,  # with seeds a prompt in pieces kills vLLM on a CPU
        "generation-config": "vllm",  # else the model's folder may change sampling behind our back
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
        "weight-transfer-config": {"backend": BACKENDS[spec.transport]},
        "enable-scale-out": True,  # token ids in, token ids out
        "scheduling-policy": "priority",  # a probe goes before the requests that wait
        "disable-uvicorn-access-log": True,
        "middleware": "grpocli.rollout.vllm.auth.RequireKey",
        **lora_flags(spec.lora_rank, spec.dtype, cpu),
    }
    # -P: the current folder is no place to import from, as for the console script
    start = [sys.executable, "-P", "-m", "grpocli.rollout.vllm.api_server"]
    known = [word for name, value in flags.items() for word in argument_words(name, value)]
    return [*start, *known, *further_words(options.vllm_args)]


def sequences(most: int, cpu: bool) -> int | None:
    """How many completions vLLM must be able to run at once, where that is more than it does by itself: it takes no
    request for more."""
    return most if most > (128 if cpu else 256) else None


def environment(key: str, shm_dir: Path, own: Path, options: VllmOptions, transport: str = "shm") -> dict[str, str]:
    """The server's: ours without what would open it or confuse it. own: its private folder."""
    env = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, *UNSAFE)}
    if plugins := env.get("VLLM_PLUGINS"):
        env["VLLM_PLUGINS"] = f"{plugins},grpocli"
    return (
        _loopback(transport)
        | {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}  # for who waits asleep: `quiet.wait_asleep`
        | env
        | {
            KEY_VARIABLE: key,
            FOLDER_VARIABLE: str(shm_dir),
            OWN_FOLDER_VARIABLE: str(own),
            **({"VLLM_RPC_BASE_PATH": str(own)} if len(os.fsencode(own)) <= LONGEST_SOCKETS else {}),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_kv_cache_gb),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK,  # its processes talk to each other on this machine alone
        }
    )


def _loopback(transport: str) -> dict[str, str]:
    """A server's processes are on one machine, but Gloo and NCCL would listen where others reach them.

    With sync=nccl the trainer, maybe on another machine, joins them. What the user's environment says comes first.
    """
    if not Path("/sys/class/net/lo").exists():
        return {}
    names = ["GLOO_SOCKET_IFNAME"] + ["NCCL_SOCKET_IFNAME"] * (transport != "nccl")
    return dict.fromkeys(names, "lo")


@contextlib.contextmanager
def serving(
    spec: Spec,
    options: VllmOptions,
    log: Path | None,
    give_up: threading.Event | None = None,
    remove: Sequence[Path] = (),
    progress: Progress = unreported,
) -> Iterator[tuple[Endpoint, Guarded]]:
    """A healthy server for as long as the block runs; after it neither processes nor weight files are left.

    give_up: once set, a start that is under way ends with an EngineError. remove: what else goes with the server, also
    where we are killed. progress: called during the start.
    Raises ConfigError for a busy port or an option that vLLM does not have, EngineError with the cause from its log
    where it does not come up.
    """
    check_plugin()
    check_port(spec.host, spec.port, spec.port_key)
    check_arguments(options.vllm_args)
    cpu, key = on_cpu(), secrets.token_urlsafe(32)
    if cpu:
        check_head_size(spec.model)
    words = command(spec, options, cpu)  # before there is a folder to leave behind
    shm_dir = _given_folder(spec.sync_folder) if spec.sync_folder else None
    began = log.stat().st_size if log and log.exists() else 0
    where = address(spec.host, spec.port)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(private_folder())
        env = environment(key, shm_dir or own.path, own.path, options, spec.transport)
        process = stack.enter_context(
            guarded(
                words,
                name="vllm",
                env=env | lora_environment(spec.lora_rank) | _devices(spec),
                log=log,
                remove=[*remove, own.path],
                hold=[own.lock],
            )
        )
        endpoint = Endpoint(where, key, str(shm_dir or own.path), str(log) if log else None, log_from=began)
        wait_healthy(process, endpoint, options.start_timeout, give_up, progress)
        yield endpoint, process


def _devices(spec: Spec) -> dict[str, str]:
    return {} if spec.gpus is None else {"CUDA_VISIBLE_DEVICES": spec.gpus}


def _given_folder(name: str) -> Path:
    """Raise ConfigError unless the folder can be made and written."""
    folder = Path(name).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot be made: {error.strerror}", key="sync.folder", value=name) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("cannot be written: choose another folder", key="sync.folder", value=name)
    return folder


def wait_healthy(
    process: Guarded,
    endpoint: Endpoint,
    timeout: float,
    give_up: threading.Event | None = None,
    progress: Progress = unreported,
) -> None:
    """Until the server answers; raises EngineError after `timeout` seconds, or if the process ends first; ConfigError
    where its log then names a key to change.

    What answers without taking our key is another server, on a port that ours will not get.
    """
    import httpx

    deadline = time.monotonic() + timeout
    start = StartupLog(Path(endpoint.log), endpoint.log_from) if endpoint.log else None
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, trust_env=False, verify=False, timeout=5) as http:
        while True:
            cause = endpoint.cause() if endpoint.log else ": its output is above"
            if (code := process.poll()) is not None:
                kind = ConfigError if endpoint.names_a_key() else EngineError
                raise kind(f"the vLLM server ended with exit code {code} while it started{cause}")
            with contextlib.suppress(httpx.HTTPError):
                if http.get("/health").is_success and http.get("/weight_info").is_success:
                    return
            if start:
                start.read()
                progress(0, 0, f"vLLM is {start.phase}", start.last)
            if give_up and give_up.is_set():
                raise EngineError("the vLLM server was not wanted any more while it started")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the vLLM server did not answer /health within {timeout:g} s (engine.start_timeout){cause}"
                )
            time.sleep(POLL)


def address(host: str, port: int) -> str:
    """The URL to reach a server that listens on `host`."""
    reach = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reach}:{port}"


def free_port() -> int:
    """Never the same one twice: a server listens on its port only some time after it was chosen."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        with _choosing:
            if port not in _chosen:
                _chosen.add(port)
                return port


def check_port(host: str, port: int, key: str) -> None:
    """Raise ConfigError, naming `key`, if something else listens there, or the host is not one of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"cannot listen there on {host} ({error.strerror}): choose another port"
            raise ConfigError(problem, key=key, value=port) from error
