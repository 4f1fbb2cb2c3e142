"""A server given by `engine.base_url`: where its key is, and whether it can serve this run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.vllm.client import Client, Refused, is_loopback
from grpocli.rollout.vllm.endpoint import Endpoint, serve_file
from grpocli.rollout.vllm.plugin import BACKEND

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.options import Vllm

SHAPE = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
SERVE = "`grpocli vllm-serve`"


def given_server(options: Vllm, job: EngineJob) -> Endpoint:
    """Where the server at `engine.base_url` is, once it is known to fit. Raises ConfigError that names the key."""
    url = (options.base_url or "").rstrip("/")
    endpoint = find_endpoint(options, url, job.sync_folder)
    client = Client(endpoint, options.request_timeout)
    try:
        _check(client, job)
    finally:
        client.close()
    if not Path(endpoint.shm_dir).is_dir() or not endpoint.shm_dir:
        raise ConfigError.of(
            "sync.folder",
            job.sync_folder,
            f"must be the folder that the server reads weights from, as this machine sees it; {SERVE} prints it",
        )
    return endpoint


def find_endpoint(options: Vllm, url: str, folder: str | None = None) -> Endpoint:
    """The key and the folder of a given server: from the config, what vllm-serve left here, the environment."""
    known = _record(options, url)
    key = known.api_key if known else _plain_key(options)
    if not key:
        raise ConfigError.of(
            "engine.api_key_file",
            options.api_key_file,
            f"no key for {url} is known here: give the file that {SERVE} printed, or set VLLM_API_KEY",
        )
    return Endpoint(url, key, folder or (known.shm_dir if known else ""))


def _record(options: Vllm, url: str) -> Endpoint | None:
    """What vllm-serve wrote about this server, if there is such a file."""
    parts = urlsplit(url)
    if options.api_key_file is None and not is_loopback(parts.hostname or ""):
        return None
    path = Path(options.api_key_file) if options.api_key_file else serve_file(parts.port or 80)
    try:
        return Endpoint.load(path)
    except (OSError, ValueError):
        return None  # it may hold a bare key, or not be there


def _plain_key(options: Vllm) -> str:
    if options.api_key_file is None:
        return os.environ.get("VLLM_API_KEY", "")
    try:
        return Path(options.api_key_file).read_text().strip()
    except OSError as error:
        raise ConfigError.of("engine.api_key_file", options.api_key_file, f"cannot be read: {error}") from error


def _check(client: Client, job: EngineJob) -> None:
    url = client.endpoint.url
    try:
        client.get("/health")
    except EngineError as error:
        problem = f"no vLLM server answers there: start one with {SERVE}, or unset it and the run starts its own"
        raise ConfigError.of("engine.base_url", url, problem) from error
    try:
        client.weight_version()
        served = client.get("/server_info?config_format=json")["vllm_config"]
    except Refused as error:
        raise ConfigError.of("engine.base_url", url, _advice(error)) from error
    if problem := misfit(served, job):
        raise ConfigError.of("engine.base_url", url, problem)


def _advice(error: Refused) -> str:
    if error.status in (401, 403):
        return "that server refuses the key: set engine.api_key_file to the file that its start printed"
    if error.status == 404:
        return f"that server has no endpoints for reinforcement learning: start it with {SERVE}"
    return str(error)


def misfit(served: dict[str, Any], job: EngineJob) -> str:
    """Why a server with this config (vLLM's own description of it) cannot serve the job; empty if it can."""
    model = served["model_config"]
    dtype = str(model["dtype"]).removeprefix("torch.")
    backend = (served.get("weight_transfer_config") or {}).get("backend")
    if backend != BACKEND or model["logprobs_mode"] != "processed_logprobs":
        return f"that server was not started for training: start it with {SERVE}"
    if dtype != job.dtype:
        return f"that server computes in {dtype}, the run in {job.dtype}: serve with dtype={job.dtype}"
    if model["max_model_len"] < job.max_tokens:
        return (
            f"that server takes {model['max_model_len']} tokens, the run needs {job.max_tokens}: serve with "
            f"max_model_len={job.max_tokens}, or lower rollout.max_prompt_tokens or rollout.max_completion_tokens"
        )
    return _other_model(Path(model["model"]), Path(job.model_path))


def _other_model(theirs: Path, ours: Path) -> str:
    """Compares the two config files, where this machine can read both; the first sync settles the rest."""
    try:
        a, b = (json.loads((folder / "config.json").read_text()) for folder in (theirs, ours))
    except OSError:
        return ""
    for name in SHAPE:
        if a.get(name) != b.get(name):
            return (
                f"that server's model has {name}={a.get(name)}, the run's {b.get(name)}: give vllm-serve and train "
                "the same model"
            )
    return ""
