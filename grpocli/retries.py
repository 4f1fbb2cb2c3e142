"""Asking a server again: after which answers that may help, and how long to wait before it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Answers after which another try may succeed."""
LONGEST_PAUSE = 30.0

_jitter = random.Random()


def pause(tries: int, first: float, answer: httpx.Response | None = None) -> float:
    """Seconds to wait after so many tries: each pause up to twice as long as the one before, or what the answer wants.

    first: the longest that the first one may be.
    """
    doubled = first * 2.0 ** min(tries - 1, 10) * _jitter.uniform(0.5, 1.0)
    return min(max(doubled, _wanted(answer) if answer is not None else 0.0), LONGEST_PAUSE)


def _wanted(answer: httpx.Response) -> float:
    """Seconds that the server asks for; 0 where it does not, or asks for a date."""
    wanted = answer.headers.get("retry-after", "")
    return float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0
