"""Servers that serve several runs: check one at `engine.base_url`, and start one with `grpocli vllm-serve`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpocli.errors import ConfigError, EngineError
from grpocli.http import is_loopback
from grpocli.models.loading import ModelPart
from grpocli.processes.signals import handle_stops, restore
from grpocli.progress import Progress, unreported
from grpocli.rollout.vllm.api_server import KEY_VARIABLE
from grpocli.rollout.vllm.client import CHECK, MODEL, RequestRefused, ServerClient
from grpocli.rollout.vllm.config import check_vllm, vllm_version
from grpocli.rollout.vllm.plugin import BACKENDS
from grpocli.rollout.vllm.server import ServerSpec, check_port, free_port, serving
from grpocli.rollout.vllm.server_files import POLL, Endpoint, serve_file

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import Serve, VllmOptions

SERVE = "`grpocli vllm-serve`"


def external_server(options: VllmOptions, url: str, job: EngineJob) -> Endpoint:
    """The endpoint of a server at `engine.base_url`, after a check. Raises ConfigError."""
    if job.transport != "shm" and not job.lora_rank:  # the trainer's vLLM sends the weights
        check_vllm("vllm")
    timeout = min(options.request_timeout, 6 * CHECK)
    try:
        ServerClient(Endpoint(url, "none", ""), timeout).get("/health")
    except EngineError as error:
        problem = f"no vLLM server answers there: start one with {SERVE}, or unset it and the run starts its own"
        raise ConfigError(f"{problem} ({error})", key="engine.base_url", value=url) from error
    endpoint = find_endpoint(options, url, job.sync_folder)
    if problem := _problem(ServerClient(endpoint, timeout, patience=min(options.reconnect_timeout, timeout)), job):
        raise ConfigError(problem, key="engine.base_url", value=url)
    if (job.transport == "shm" or job.lora_rank) and not (endpoint.shm_dir and Path(endpoint.shm_dir).is_dir()):
        problem = f"must be the folder that the server at {url} reads weights from, as this machine sees it"
        raise ConfigError(f"{problem}; {SERVE} prints it", key="sync.folder", value=job.sync_folder)
    return endpoint


def find_endpoint(options: VllmOptions, url: str, folder: str | None = None) -> Endpoint:
    """The key and the folder of a server, from vllm-serve's file (here, or a copy), or from the environment."""
    file, parts = options.key_file(url), urlsplit(url)
    path = Path(file).expanduser() if file else serve_file(parts.port or 80)
    if file or (is_loopback(parts.hostname or "") and path.exists()):
        try:
            known = Endpoint.load(path)
        except (OSError, ValueError) as error:
            problem = f"is not the file that {SERVE} printed: {error}"
            raise ConfigError(problem, key="engine.api_key_file", value=file) from error
    else:
        known = Endpoint(url, os.environ.get(KEY_VARIABLE, ""), "")
    if not known.api_key:
        problem = f"no key for {url} is known here: give the file that {SERVE} printed, or set {KEY_VARIABLE}"
        raise ConfigError(problem, key="engine.api_key_file", value=file)
    if not (known.api_key.isascii() and known.api_key.isprintable()):  # an error of HTTP would print it
        problem = f"the key for {url} has a line break or another character that no header can have"
        raise ConfigError(problem, key="engine.api_key_file", value=file)
    return Endpoint(url, known.api_key, folder or known.shm_dir)


def _problem(client: ServerClient, job: EngineJob) -> str:
    """The reason why a server that answers cannot serve the job; "" if it can."""
    try:
        client.weight_version()
        problem = misfit(client.get("/server_info?config_format=json")["vllm_config"], job)
        if problem or job.transport == "shm" or job.lora_rank:
            return problem
        return version_misfit(str(client.get("/version")["version"])[:40], job.transport)
    except (EngineError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, RequestRefused) and error.status in (401, 403):
            return "that server refuses the key: set engine.api_key_file to the file that its start printed"
        return f"the server there is not a vLLM server for training: start one with {SERVE} ({error})"


def version_misfit(theirs: str, transport: str) -> str:
    """The reason why the trainer's vLLM cannot send weights to a server's; "" if it can.

    The sides fit only within a minor: 0.33 sends an empty update for unchanged parameters, which 0.32 would label as
    new weights. sync=shm and adapters use no vLLM of the trainer's.
    """
    ours = vllm_version()
    if ours.split(".")[:2] == theirs.split(".")[:2]:
        return ""
    return (
        f"that server runs vLLM {theirs or 'of unknown version'}, and sync={transport} sends with the trainer's vLLM "
        f"{ours}: install the same version for both, or give vllm-serve and train sync=shm"
    )


def misfit(served: dict[str, Any], job: EngineJob) -> str:
    """The reason why a server cannot serve the job, from vLLM's description of its config; "" if it can."""
    model = served["model_config"]
    backend = (served.get("weight_transfer_config") or {}).get("backend")
    transport = next((name for name, known in BACKENDS.items() if known == backend), None)
    named = model.get("served_model_name", MODEL)
    if transport is None or model["logprobs_mode"] != "processed_logprobs" or named not in (MODEL, [MODEL]):
        return f"that server was not started for training: start it with {SERVE}"
    rank, tokens = (served.get("lora_config") or {}).get("max_lora_rank", 0), model["max_model_len"]
    head = (model.get("hf_overrides") or {}).get("head_dtype", "model")
    same = {
        "sync": (transport, job.transport),
        "dtype": (str(model["dtype"]).removeprefix("torch."), job.dtype),
        "model.head_dtype": (head, job.head_dtype or "model") if job.dtype != "float32" else ("", ""),
        "whether model.lora.rank is above 0": (rank > 0, job.lora_rank > 0),
    }
    for key, (theirs, ours) in same.items():
        if theirs != ours:
            return f"that server has another {key} than the run, {theirs} instead of {ours}: serve with the run's"
    if tokens < job.max_tokens:
        return f"that server takes {tokens} tokens, the run needs {job.max_tokens}: raise its engine.max_model_len"
    if rank < job.lora_rank:
        return f"that server takes adapters up to rank {rank}: serve with model.lora.rank={job.lora_rank}"
    return ""


def build_server_config(config: DictConfig) -> Serve:
    """Build the settings. Raises ConfigError, also for another engine than vLLM."""
    from grpocli.config.build import build

    if "base_url" not in config.engine:
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
    """Serve until SIGINT or SIGTERM, then remove the key and all weights. Returns the exit code, 0. The log stays.

    model_path, dtype, served_path: see `EngineJob`. ready: called when the server answers.
    Raises ConfigError for a busy port, EngineError if the server ends by itself.
    """
    port, job = config.port or free_port(), config.job(model_path, dtype, served_path)
    record = serve_file(port)
    log = record.with_suffix(".log")
    check_port(config.host, port)  # before the log of a server that uses the port is changed
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log.unlink(missing_ok=True)
    log.touch(mode=0o600)
    spec = ServerSpec(job, port, config.engine.max_model_len, host=config.host)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        stack.callback(restore, handle_stops(_interrupt))
        endpoint, process = stack.enter_context(serving(spec, config.engine, log, remove=[record], progress=progress))
        stack.callback(record.unlink, missing_ok=True)
        endpoint.save(record)
        ready()
        print(how_to_use(endpoint, record, job), flush=True)
        while (code := process.poll()) is None:  # a blocking wait would not notice a signal to another thread
            time.sleep(POLL)
        raise EngineError(f"the vLLM server ended by itself with exit code {code}{endpoint.cause()}")
    print("vllm-serve: stopped", flush=True)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Make a stopping signal act like Ctrl-C, once, so that a second one does not interrupt the cleanup."""
    handle_stops(signal.SIG_IGN)
    raise KeyboardInterrupt


def how_to_use(endpoint: Endpoint, record: Path, job: EngineJob) -> str:
    """The printed description of the server, and the overrides with which runs use it. record: holds the key."""
    rank, shm, head = job.lora_rank, job.transport == "shm", job.head_dtype or "null"
    choices = [f"model.head_dtype={head}"] * (job.dtype != "float32" and job.head_dtype != ModelPart().head_dtype)
    choices += [f"model.lora.rank={rank}"] * bool(rank) + [f"sync={job.transport}"] * (not shm)
    lines = [
        f"\nvLLM serves at {endpoint.url}",
        f"  model    {job.model_path}, in {job.dtype}",
        f"  weights  sync={job.transport}" + (f", through {endpoint.shm_dir}" if shm else ""),
        f"  key      {record} (mode 0600; a run on this machine finds it)",
        f"  log      {endpoint.log}",
        "train with it, with the same model= and model.dtype=:",
        "  " + " ".join(["grpocli train engine=vllm", f"engine.base_url={endpoint.url}", *choices]),
        "from another machine, where this one serves with host=0.0.0.0:",
        f"  engine.base_url=http://THIS_MACHINE:{urlsplit(endpoint.url).port} engine.api_key_file=COPY_OF_THE_KEY",
        *(["  and here and there sync=shm sync.folder=A_FOLDER_THAT_BOTH_SEE"] if shm else []),
        "stop with Ctrl-C\n",
    ]
    return "\n".join(lines)
