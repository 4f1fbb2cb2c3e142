"""Isolate the trainer from vLLM in its process: vLLM's changes to the process hold only during vLLM's own calls."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.files import QuietFileHandler
from grpocli.processes.random_state import keep_random_state

if TYPE_CHECKING:
    import torch

Variables = dict[str, str | None]  # None: not set

SETTINGS: Mapping[str, str | None] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in this process
    "VLLM_CONFIGURE_LOGGING": "0",  # `log_to` configures its log
    "VLLM_LOGGING_CONFIG_PATH": None,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": None,  # would override engine.cpu_kv_cache_gb
}


class VllmEnvironment:
    """`with environment.active():` around every use of vLLM.

    Outside of the block, environment variables, random generators, torch's threads, matmul precision and stream, the
    exception hook and warning filters are as if vLLM were not there. Its environment variables and stream return with
    each block: it reads some variables late, and computes on a stream of its own. Other threads see its state during a
    block.
    """

    def __init__(self) -> None:
        self._variables: Variables = dict(SETTINGS)
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # vLLM seeds all random generators at its start, and its sampler draws from torch's
        with warnings.catch_warnings(), keep_random_state(), _keep_torch_settings(), self._own_stream():
            before: Variables = dict(os.environ)
            hook = sys.excepthook
            _apply(self._variables)
            try:
                yield
            finally:
                after: Variables = dict(os.environ)
                self._variables = _difference(before, after)
                _apply(_difference(after, before))
                sys.excepthook = hook

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Make vLLM's stream of the GPU the current one, and the trainer's again; each waits for the other's work."""
        import torch

        if not torch.cuda.is_available():
            yield
            return
        trainers = torch.cuda.current_stream()
        _switch(trainers, self._stream or trainers)
        try:
            yield
        finally:
            self._stream = torch.cuda.current_stream()
            _switch(self._stream, trainers)


def _switch(before: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
    import torch

    if after != before:
        after.wait_stream(before)
        torch.cuda.set_stream(after)


def _difference(before: Variables, after: Variables) -> Variables:
    """The variables to set to get from `before` to `after`."""
    return {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}


def _apply(changes: Variables) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _keep_torch_settings() -> Iterator[None]:
    """Restore torch's threads and precision.

    On a CPU vLLM replaces `torch.set_num_threads` by a function that does nothing; on a GPU it sets one thread.
    """
    import torch

    precision, threads, set_threads = (
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.set_num_threads,
    )
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def log_to(path: Path) -> None:
    """Write vLLM's log to a file instead of the terminal and the run's log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("vllm")
    handler = QuietFileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(name)s:%(lineno)d] %(message)s"))
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Redirect standard error to a file, on the level of descriptors, because C++ libraries write there directly."""
    sys.stderr.flush()
    kept = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(file, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)
