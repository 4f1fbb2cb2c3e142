"""HTTP to servers that a config names: how much to read and for how long, which responses to retry and when."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes after which a retry may succeed."""
MAX_DELAY = 30.0
"""Seconds."""

_jitter = random.Random()


class TooLong(ValueError):
    """A response that is longer than the limit, or compressed."""


async def bounded(
    http: httpx.AsyncClient, method: str, url: str, limit: int, seconds: float | None = None, **more: Any
) -> httpx.Response:
    """The whole response. Raises TooLong, without reading the rest, if it has more than `limit` bytes.

    Compressed responses, which no request asks for, raise TooLong too: a few bytes may become gigabytes.
    seconds: for all of it, since httpx's timeouts restart with every byte; null: the caller's deadline. Raises
    httpx.ReadTimeout after them.
    """
    import httpx

    content = bytearray()
    try:
        async with (
            asyncio.timeout(seconds),
            http.stream(method, url, headers={"Accept-Encoding": "identity"}, **more) as response,
        ):
            if response.headers.get("content-encoding", "identity") != "identity":
                raise TooLong("its answer is compressed, which was not asked for")
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > limit:
                    raise TooLong(f"its answer is longer than {limit:,} bytes")
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from error
    return httpx.Response(
        response.status_code, headers=response.headers, content=bytes(content), request=response.request
    )


def fetch(url: str, limit: int, seconds: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """The response to one GET, as `bounded` reads it."""
    import httpx

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(headers=headers, timeout=seconds) as http:
            return await bounded(http, "GET", url, limit, seconds)

    return asyncio.run(ask())


def json_of(response: httpx.Response) -> Any:
    """The response's JSON. Raises ValueError, also for one that is nested too deeply."""
    try:
        return response.json()
    except RecursionError as error:
        raise ValueError("its answer is nested too deeply") from error


def retry_delay(tries: int, first: float, answer: httpx.Response | None = None) -> float:
    """Seconds to wait before a retry: exponential backoff with jitter, or the response's Retry-After if that is longer.

    tries: the number of tries so far. first: the maximum of the first delay.
    """
    doubled = first * 2.0 ** min(tries - 1, 10) * _jitter.uniform(0.5, 1.0)
    return min(max(doubled, _retry_after(answer) if answer is not None else 0.0), MAX_DELAY)


def _retry_after(answer: httpx.Response) -> float:
    """Seconds of the Retry-After header; 0 without one, or if it is a date."""
    wanted = answer.headers.get("retry-after", "")
    return float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0


def is_loopback(host: str) -> bool:
    """Whether a URL's host is a loopback name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
