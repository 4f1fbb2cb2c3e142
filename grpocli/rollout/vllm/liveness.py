"""Whether a server still works: a timeout that resets while the server makes progress."""

from __future__ import annotations

import re
import time

import httpx

from grpocli.http import request

CHECK_TIMEOUT = 5.0  # seconds for one check of a server
LONGEST = 10  # timeouts after which a call fails, even if the server makes progress
PAUSED_BY = "by another run or by one that was killed in a sync; give each run its own server, or start this one again"
TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Liveness:
    """The signs of progress of one server, shared by all calls of this process.

    last_sign: the monotonic time of the last answer to any call, or of the last token computed for any client.
    served: the monotonic time of the last successful call. paused: whether the server held requests at the last check.
    """

    def __init__(self) -> None:
        self.last_sign, self.served, self.paused = 0.0, 0.0, False
        self._tokens: float | None = None

    def note(self) -> None:
        """Record a sign of progress."""
        self.last_sign = time.monotonic()

    async def check(self, http: httpx.AsyncClient, pause_counts: bool) -> None:
        """Ask the server whether it has computed tokens since the last check.

        pause_counts: whether a pause is a sign of progress, because requests then wait for a sync.
        """
        tokens = await tokens_computed(http)
        if tokens is not None and self._tokens is not None and tokens != self._tokens:
            self.note()
        self._tokens = tokens
        self.paused = pause_counts and await is_paused(http)
        if self.paused:
            self.note()


class ProgressTimeout:
    """The timeout of one call: `timeout` seconds without a sign of progress, and `LONGEST` times as much in all."""

    def __init__(self, liveness: Liveness, timeout: float) -> None:
        self.liveness, self.timeout, self.began = liveness, timeout, time.monotonic()

    @property
    def left(self) -> float:
        """Seconds left if no further sign of progress comes; 0 when the timeout has passed."""
        now = time.monotonic()
        without_sign = max(self.began, self.liveness.last_sign) + self.timeout - now
        return max(0.0, min(without_sign, self.began + LONGEST * self.timeout - now))

    @property
    def problem(self) -> str:
        """The end of the error message when the timeout has passed."""
        if time.monotonic() < self.began + LONGEST * self.timeout:
            return f"nor made progress, within {self.timeout:g} s (engine.request_timeout)"
        paused = f": it is paused, {PAUSED_BY}" if self.liveness.paused else ""
        return f"within {LONGEST} times engine.request_timeout={self.timeout:g} s{paused}"


async def tokens_computed(http: httpx.AsyncClient, kinds: re.Pattern[str] = TOKENS) -> float | None:
    """Tokens since the server's start, for all of its clients; None if the server does not report them."""
    response = await _get(http, "/metrics")
    counts = kinds.findall(response.text) if response else []
    try:
        return sum(map(float, counts)) if counts else None
    except ValueError:
        return None


async def is_paused(http: httpx.AsyncClient) -> bool:
    """Whether the server reports that it is paused."""
    response = await _get(http, "/is_paused")
    try:
        body = response.json() if response else None
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("is_paused") is True


async def health(http: httpx.AsyncClient) -> bool | None:
    """Whether the server runs and its engine lives; None if unknown, since the server may be busy."""
    try:
        response = await request(http, "GET", "/health", CHECK_TIMEOUT)
    except httpx.HTTPError as error:
        return False if isinstance(error, httpx.ConnectError) else None
    return True if response.is_success else False if response.status_code == 503 else None


async def _get(http: httpx.AsyncClient, path: str) -> httpx.Response | None:
    """A successful answer or None: the waiting call and `health` report the error."""
    try:
        response = await request(http, "GET", path, CHECK_TIMEOUT)
    except httpx.HTTPError:
        return None
    return response if response.is_success else None
