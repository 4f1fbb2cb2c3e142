"""HTTP to servers that may fail or lie: which answers are worth a retry, how long to wait, how much to read."""

from __future__ import annotations

import ipaddress
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes after which a retry may succeed."""
LONGEST_PAUSE = 30.0

_jitter = random.Random()


class TooLong(Exception):
    """An answer of more bytes than it may have."""


async def bounded(http: httpx.AsyncClient, method: str, url: str, limit: int, **more: Any) -> httpx.Response:
    """The whole response. Raises TooLong where it has more than `limit` bytes, without reading the rest, or is
    compressed, which was not asked for: a few bytes of it may become gigabytes."""
    import httpx

    async with http.stream(method, url, headers={"Accept-Encoding": "identity"}, **more) as response:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise TooLong("its answer is compressed, which was not asked for")
        content = bytearray()
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > limit:
                raise TooLong(f"its answer is longer than {limit:,} bytes")
    return httpx.Response(
        response.status_code, headers=response.headers, content=bytes(content), request=response.request
    )


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


def is_loopback(host: str) -> bool:
    """Whether a host, as a URL names it, is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
