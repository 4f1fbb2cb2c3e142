"""A reward is somebody else's code in the process that trains: what it changes for everybody is put back."""

from __future__ import annotations

import logging
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

if TYPE_CHECKING:
    from grpocli.rewards.reward import Sample

logger = logging.getLogger(__name__)


@contextmanager
def undisturbed(name: str, samples: Sequence[Sample]) -> Iterator[None]:
    """While the reward `name` scores `samples`.

    Its random numbers depend on the samples alone, so that a resumed run repeats them, and everybody else's on nothing
    that it draws.
    """
    with _settings(name), _random(seed_for(samples)), _no_exit():
        yield


def seed_for(samples: Sequence[Sample]) -> int:
    """Of the random numbers that a reward draws for these samples."""
    beginnings = [sample.token_ids[:16] for sample in samples]  # enough to differ from step to step
    return zlib.crc32(repr(beginnings).encode())


@contextmanager
def _settings(name: str) -> Iterator[None]:
    """torch's, put back only where they have changed: another thread may be computing."""
    before = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        gradients, dtype, threads = before
        if (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()) != before:
            logger.warning("%s changed torch's gradients, default dtype or threads, which were put back", name)
            torch.set_grad_enabled(gradients)
            torch.set_default_dtype(dtype)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextmanager
def _random(seed: int) -> Iterator[None]:
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@contextmanager
def _no_exit() -> Iterator[None]:
    """`os._exit` would end the run without a word; processes that a reward forks may still end so."""
    leave, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        raise SystemExit(f"os._exit({status}), which would have ended the run without a word")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave
