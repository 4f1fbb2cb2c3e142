"""`grpocli vllm-serve`: the server that `engine=vllm` would start, in the foreground, for any number of runs."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import part, require
from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.vllm.options import Vllm

if TYPE_CHECKING:
    from grpocli.launch.guard import Guarded
    from grpocli.rollout.vllm.endpoint import Endpoint


@part("", "serve_schema")
class Serve:
    """model: as for `train`. engine: the keys of `engine=vllm` (memory, parallelism, `vllm_args`).

    host: 127.0.0.1 is this machine alone; 0.0.0.0 is everyone who reaches it and has the key. port: 0 takes a
    free one. dtype: auto is what `train` would compute in. max_model_len: tokens of prompt plus completion
    (null: the model's own limit).
    """

    model: Any
    engine: Any
    sync: Any
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.engine, Vllm):
            raise ConfigError("engine: vllm-serve serves with engine=vllm; leave it out")
        require(self, "port", 0 <= self.port < 65536, "must be 0 (any free port) to 65535")
        require(self, "max_model_len", self.max_model_len is None or self.max_model_len > 1, "must be above 1")


def serve(config: Serve, model_path: str, dtype: str) -> int:
    """Serve until SIGINT or SIGTERM, then leave nothing behind; the exit code, 0.

    model_path: a folder or hub id. dtype: "float32", "bfloat16" ...; `config.dtype` as the caller understands it.
    Raises ConfigError for a busy port, EngineError if the server ends by itself.
    """
    from grpocli.rollout.vllm.endpoint import serve_file
    from grpocli.rollout.vllm.server import Spec, free_port, serving

    port = config.port or free_port()
    limit = config.max_model_len or config.engine.max_model_len
    spec = Spec(model_path, dtype, config.seed, port, config.host, limit, port_key="port")
    record = serve_file(port)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _interrupted_by_term(),
        serving(spec, config.engine, log=None) as (endpoint, process),
    ):
        try:
            endpoint.save(record)
            print(_how_to_use(endpoint, record), flush=True)
            _wait(process)
        finally:
            record.unlink(missing_ok=True)
    print("vllm-serve: stopped", flush=True)
    return 0


def _wait(process: Guarded) -> None:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise EngineError(f"the vLLM server ended by itself, with exit code {process.wait(3600)}; see above")


def _how_to_use(endpoint: Endpoint, record: Path) -> str:
    return (
        f"\nvLLM serves at {endpoint.url}\n"
        f"  train with it:  grpocli train engine=vllm engine.base_url={endpoint.url}\n"
        f"  its key:        {record} (mode 0600; runs on this machine find it by themselves)\n"
        f"  from elsewhere: engine.api_key_file=COPY_OF_THAT_FILE sync=shm sync.folder=SHARED_FOLDER\n"
        f"  weights come through {endpoint.shm_dir}\n"
        f"  stop with Ctrl-C\n"
    )


@contextlib.contextmanager
def _interrupted_by_term() -> Iterator[None]:
    """SIGTERM means what Ctrl-C means; either one, once: a second must not break off the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for stopping in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stopping, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
