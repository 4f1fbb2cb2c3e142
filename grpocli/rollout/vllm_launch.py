"""engine=vllm before any trainer process exists: start the run's own server, or check the given one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.vllm_endpoint import Endpoint, run_file, serve_file
from grpocli.rollout.vllm_server import Spec, free_port, serving

if TYPE_CHECKING:
    from grpocli.launch.guard import Guarded
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm_engine import Vllm

PROBE_ROOM = 64  # tokens of context that the check after a sync needs at least
PORT_TRIES = 3


@contextlib.contextmanager
def launch(options: Vllm, job: EngineJob) -> Iterator[None]:
    """Leave the server's address and key in the run folder for the trainer processes, until the block ends."""
    with contextlib.ExitStack() as stack:
        if options.base_url is None:
            endpoint = _start(stack, options, job)
        else:
            endpoint = _given(options, options.base_url, job)
        file = run_file(job.run_dir)
        stack.callback(file.unlink, missing_ok=True)
        endpoint.save(file)
        yield


def _start(stack: contextlib.ExitStack, options: Vllm, job: EngineJob) -> Endpoint:
    """A free port may be taken by another process before the server listens: then try another."""
    tries = 1 if options.port else PORT_TRIES
    while True:
        tries -= 1
        try:
            endpoint, _process = stack.enter_context(own_server(options, job))
            return endpoint
        except EngineError as error:
            if tries == 0 or "Address already in use" not in str(error):
                raise


def own_server(options: Vllm, job: EngineJob) -> contextlib.AbstractContextManager[tuple[Endpoint, Guarded]]:
    """The server of one run, as a context."""
    spec = Spec(
        model=job.model_path,
        dtype=job.dtype,
        seed=job.seed,
        port=options.port or free_port(),
        max_model_len=options.max_model_len or max(job.max_tokens, PROBE_ROOM),
    )
    return serving(spec, options, job.run_dir.absolute() / "logs" / "vllm.log")


def _given(options: Vllm, url: str, job: EngineJob) -> Endpoint:
    from grpocli.rollout.vllm_client import Client, check_given

    endpoint = find_endpoint(options, url.rstrip("/"))
    client = Client(endpoint, options.request_timeout)
    try:
        check_given(client, job.max_tokens)
    finally:
        client.close()
    if not Path(endpoint.shm_dir).is_dir():
        raise ConfigError.of(
            "engine.shm_dir",
            options.shm_dir,
            "must be the folder from which the server reads weights (its "
            "GRPOCLI_SHM_DIR), as this machine sees it; `grpocli vllm-serve` prints it",
        )
    return endpoint


def find_endpoint(options: Vllm, url: str) -> Endpoint:
    """The key and the folder of a given server: from the config, what vllm-serve left here, the environment.

    Raises ConfigError where no key is found.
    """
    known = _record(options, url)
    key = known.api_key if known else _plain_key(options)
    if not key:
        raise ConfigError.of(
            "engine.api_key_file",
            options.api_key_file,
            f"no key for {url} is known here: give the file that "
            "`grpocli vllm-serve` printed, or set VLLM_API_KEY",
        )
    return Endpoint(url, key, options.shm_dir or (known.shm_dir if known else ""))


def _record(options: Vllm, url: str) -> Endpoint | None:
    """What vllm-serve wrote about this server, if it is ours to read."""
    from grpocli.rollout.vllm_client import is_loopback

    parts = urlsplit(url)
    if options.api_key_file is None and not is_loopback(parts.hostname or ""):
        return None
    path = Path(options.api_key_file) if options.api_key_file else serve_file(parts.port or 80)
    try:
        return Endpoint.load(path)
    except (FileNotFoundError, ValueError):
        return None


def _plain_key(options: Vllm) -> str:
    if options.api_key_file is None:
        return os.environ.get("VLLM_API_KEY", "")
    try:
        return Path(options.api_key_file).read_text().strip()
    except OSError as error:
        raise ConfigError.of(
            "engine.api_key_file", options.api_key_file, f"cannot be read: {error}"
        ) from error
