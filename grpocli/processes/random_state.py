"""Keeping random draws of other code apart from those of the run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_random_state() -> Iterator[None]:
    """A block after which the random generators of Python, NumPy and torch are as before it."""
    import numpy as np
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
