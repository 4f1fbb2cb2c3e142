"""Retries of HTTP requests: which answers are worth one, and how long to wait before it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes after which a retry may succeed."""
LONGEST_PAUSE = 30.0

_jitter = random.Random()


def pause(tries: int, first: float, answer: httpx.Response | None = None) -> float:
    """Seconds to wait before a retry: exponential backoff with jitter, or what the answer asks for, if that is longer.

    tries: made so far. first: the longest first pause.
    """
    doubled = first * 2.0 ** min(tries - 1, 10) * _jitter.uniform(0.5, 1.0)
    return min(max(doubled, _retry_after(answer) if answer is not None else 0.0), LONGEST_PAUSE)


def _retry_after(answer: httpx.Response) -> float:
    """Seconds of the Retry-After header; 0 where there is none, or it is a date."""
    wanted = answer.headers.get("retry-after", "")
    return float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0
