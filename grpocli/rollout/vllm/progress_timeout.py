"""How long an answer is waited for: while the server shows that it works, and a fixed number of seconds without."""

from __future__ import annotations

import re
import time

import httpx

from grpocli.http import TooLong, bounded

LOOK_TIMEOUT = 5.0  # seconds for one look at a server
LARGEST = 16_000_000  # bytes of its answer
LONGEST = 10  # times the timeout: after that one answer is given up whatever the server shows
TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Signs:
    """What shows that one server works, as far as this process knows; all calls to it share them.

    heard: when the last sign came, by the monotonic clock: an answer to any call, or a token computed for anybody.
    served: when the last call succeeded.
    """

    def __init__(self) -> None:
        self.heard = self.served = 0.0
        self._tokens: float | None = None

    def hear(self) -> None:
        self.heard = time.monotonic()

    async def look(self, http: httpx.AsyncClient, pause_counts: bool) -> None:
        """Ask the server what it has done since the last look.

        pause_counts: whether being paused is a sign: requests wait then, for the weights that somebody sends.
        """
        tokens = await tokens_computed(http)
        if tokens is not None and self._tokens is not None and tokens != self._tokens:
            self.hear()
        self._tokens = tokens
        if pause_counts and await is_paused(http):
            self.hear()


class Patience:
    """For one call. It is over `timeout` seconds after its begin or the last sign, and after `LONGEST` of them."""

    def __init__(self, signs: Signs, timeout: float) -> None:
        self.signs, self.timeout, self.began = signs, timeout, time.monotonic()

    @property
    def left(self) -> float:
        """Seconds without a sign from now on until it is over; 0 when it is."""
        now = time.monotonic()
        alone = max(self.began, self.signs.heard) + self.timeout - now
        return max(0.0, min(alone, self.began + LONGEST * self.timeout - now))

    @property
    def problem(self) -> str:
        """What to say when it is over."""
        if time.monotonic() < self.began + LONGEST * self.timeout:
            return f"nor showed that it works, within {self.timeout:g} s (engine.request_timeout)"
        return f"within {LONGEST} times engine.request_timeout={self.timeout:g} s"


async def tokens_computed(http: httpx.AsyncClient, kinds: re.Pattern[str] = TOKENS) -> float | None:
    """Since the server's start, for all of its clients; None where it does not say."""
    response = await _got(http, "/metrics")
    counts = kinds.findall(response.text) if response else []
    try:
        return sum(map(float, counts)) if counts else None
    except ValueError:
        return None


async def is_paused(http: httpx.AsyncClient) -> bool:
    response = await _got(http, "/is_paused")
    try:
        said = response.json() if response else None
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("is_paused") is True


async def health(http: httpx.AsyncClient) -> bool | None:
    """Whether the server is there and its engine lives; None where it does not say: it may be busy."""
    try:
        response = await bounded(http, "GET", "/health", LARGEST, timeout=LOOK_TIMEOUT)
    except TooLong:
        return None
    except httpx.HTTPError as error:
        return False if isinstance(error, httpx.ConnectError) else None
    return True if response.is_success else False if response.status_code == 503 else None


async def _got(http: httpx.AsyncClient, path: str) -> httpx.Response | None:
    """The answer if there is one: what is wrong with the server is for the call that waits, and for `health`."""
    try:
        response = await bounded(http, "GET", path, LARGEST, timeout=LOOK_TIMEOUT)
    except (TooLong, httpx.HTTPError):
        return None
    return response if response.is_success else None
