"""Seeds from counters: nothing random has a state to be saved."""

from __future__ import annotations

import numpy as np


def seed_of(*parts: int) -> int:
    """A seed for one prompt's completions from the run's seed and counters: nothing else to save or restore."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
