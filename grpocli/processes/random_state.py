"""Keeping random draws of other code apart from those of the run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_random_state(seed: int | None = None) -> Iterator[None]:
    """A block that begins with this seed, and after which the generators of Python, NumPy and torch are as before."""
    import numpy as np
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
