"""Which made examples are for evaluation: decided by their text alone, so that no size of either split changes it."""

from __future__ import annotations

import hashlib


def is_held_out(text: str, share: float) -> bool:
    """True for about `share` of all texts, in 256ths."""
    return hashlib.sha256(text.encode()).digest()[0] < share * 256
