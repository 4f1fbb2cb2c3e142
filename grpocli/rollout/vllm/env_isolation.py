"""vLLM as a guest in the trainer's process: what it changes of the process holds during its own calls alone."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpocli.files import QuietFileHandler

Environment = dict[str, str | None]  # None: not set

SETTINGS: Mapping[str, str | None] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in this process
    "VLLM_CONFIGURE_LOGGING": "0",  # its log goes where `log_to` sends it
    "VLLM_LOGGING_CONFIG_PATH": None,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": None,  # it would win over engine.cpu_kv_cache_gb
}


class Guest:
    """`with guest.visiting():` around every use of vLLM.

    Outside of it the environment, the random generators, torch's threads and matmul precision, the handler of uncaught
    exceptions and the filters of warnings are as if vLLM were not there. Its environment comes back with it, because it
    reads some of its variables late. Other threads see it during a visit.
    """

    def __init__(self) -> None:
        self._environment: Environment = dict(SETTINGS)

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        with warnings.catch_warnings(), _random_state_kept(), _torch_settings_kept():
            before: Environment = dict(os.environ)
            hook = sys.excepthook
            _apply(self._environment)
            try:
                yield
            finally:
                after: Environment = dict(os.environ)
                self._environment = _difference(before, after)
                _apply(_difference(after, before))
                sys.excepthook = hook


def _difference(before: Environment, after: Environment) -> Environment:
    """What has to be set to get from one to the other."""
    return {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}


def _apply(changes: Environment) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds every generator when it starts, and its sampler draws from torch's."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _torch_settings_kept() -> Iterator[None]:
    """On a CPU vLLM replaces `torch.set_num_threads` by a function that does nothing; on a GPU it takes one thread."""
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
    """Send vLLM's log to a file: neither to the terminal nor to the run's own log."""
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
    """Send what is written to standard error to a file: libraries in C++ write there without asking Python."""
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
