"""HTTP to servers that a config names: deadlines, and which responses to retry and when."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes after which a retry may succeed."""
MAX_DELAY = 30.0
"""Seconds."""

_jitter = random.Random()


async def request(http: httpx.AsyncClient, method: str, url: str, seconds: float, **more: Any) -> httpx.Response:
    """The response, whole within `seconds`, else httpx.ReadTimeout: the timeouts of httpx restart with every byte."""
    import httpx

    try:
        async with asyncio.timeout(seconds):
            return await http.request(method, url, **more)
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from error


def fetch(url: str, seconds: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """The response to one GET, whole within `seconds`."""
    import httpx

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(headers=headers, timeout=seconds) as http:
            return await request(http, "GET", url, seconds)

    return asyncio.run(ask())


async def answered(
    send: Callable[[], Awaitable[httpx.Response]], delay: float, retries: float, busy_retries: float
) -> httpx.Response:
    """The response of a request, which is sent again while the server is busy and after a lost connection.

    delay: seconds at most before the first retry. retries: at most so many, of any kind, before a lost connection is
    raised as httpx.HTTPError. busy_retries: so many before a response with a status of BUSY is returned.
    """
    import httpx

    tries = 0
    while True:
        tries, response = tries + 1, None
        try:
            response = await send()
        except httpx.HTTPError:
            if tries > retries:
                raise
        if response is not None and (response.status_code not in BUSY or tries > busy_retries):
            return response
        await asyncio.sleep(retry_delay(tries, delay, response))


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


def is_server_url(text: str) -> bool:
    """Whether a text is the URL of a server: http or https, with a host, and a port that exists if it names one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, or a port that is not a number
        return False


def is_loopback(host: str) -> bool:
    """Whether a URL's host is a loopback name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
