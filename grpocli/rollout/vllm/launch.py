"""engine=vllm before any trainer process exists: start the run's own server, or check the given one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.vllm.endpoint import Endpoint, run_file
from grpocli.rollout.vllm.given import given_server
from grpocli.rollout.vllm.server import Spec, free_port, serving

if TYPE_CHECKING:
    from grpocli.launch.guard import Guarded
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.options import Vllm

PROBE_ROOM = 64  # tokens of context that the check after a sync needs at least
PORT_TRIES = 3


@contextlib.contextmanager
def launch(options: Vllm, job: EngineJob) -> Iterator[None]:
    """Leave the server's address and key in the run folder for the trainer processes, until the block ends."""
    with contextlib.ExitStack() as stack:
        endpoint = given_server(options, job) if options.base_url else _start(stack, options, job)
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
    """The server of one run, as a context. Raises ConfigError if its context was chosen too small for the run."""
    if options.max_model_len is not None and options.max_model_len < job.max_tokens:
        problem = f"the run's prompts and completions need {job.max_tokens} tokens: raise it, or set it to null"
        raise ConfigError.of("engine.max_model_len", options.max_model_len, problem)
    spec = Spec(
        model=job.model_path,
        dtype=job.dtype,
        seed=job.seed,
        port=options.port or free_port(),
        max_model_len=options.max_model_len or max(job.max_tokens, PROBE_ROOM),
    )
    return serving(spec, options, job.run_dir.absolute() / "logs" / "vllm.log")
