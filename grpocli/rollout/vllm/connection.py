"""HTTP calls to one vLLM server: repeated while it is busy, given up when it is gone or makes no progress.

The timeout of a call resets while the server makes progress: it computes tokens for any client, answers another call,
or is paused for a sync.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from grpocli.errors import EngineError
from grpocli.http import BUSY, is_loopback, request, retry_delay
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.text import mask

T = TypeVar("T")
logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
CHECK_TIMEOUT = 5.0  # seconds for one check of a server
HEARTBEAT = 5.0  # seconds between checks of a server while an answer is awaited
LONGEST = 10  # timeouts after which a call fails, even if the server makes progress
GENERATE = "/inference/v1/generate"  # token ids in, token ids out
REPEATABLE = (GENERATE, "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
"""Requests besides GET that may be retried; with fixed seeds completions are the same."""
FIRST_DELAY = 0.5  # seconds at most before the first retry at a busy server
PAUSED = "Generation is paused"  # with 503, the answer of vLLM 0.33 to a request during a pause; 0.32 holds the request
PAUSED_DELAY = 0.25  # seconds before such a request is repeated
PAUSED_BY = "by another run or by one that was killed in a sync; give each run its own server, or start this one again"
TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Refused(EngineError):
    """The server answered with an HTTP error. answer: the response."""

    def __init__(self, url: str, path: str, answer: httpx.Response, message: str) -> None:
        super().__init__(f"the vLLM server at {url} refused {path} ({answer.status_code}): {message}")
        self.status, self.path, self.answer = answer.status_code, path, answer


class ServerGone(EngineError):
    """The server cannot be reached, did not answer in time, or its engine died; a new server must take its place."""


class KeepsRefusing(ServerGone):
    """The server answers, but has been busy or failing for longer than `engine.patience`."""


class Connection:
    """Calls to the server at one address, from several threads; see `ServerClient`.

    lost: the error by which the server was found gone, stuck or replaced; None while it answers.
    numbered: whether the server's weights have carried a version of this run.
    last_sign: the monotonic time of the last answer to any call, or of the last token computed for any client.
    paused: whether the server held requests at the last check.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, patience: float) -> None:
        self.endpoint, self.timeout, self.patience = endpoint, timeout, patience
        self.where = f"the vLLM server at {endpoint.url}"
        self.lost: ServerGone | None = None
        self.numbered = False
        self.last_sign, self.paused = 0.0, False
        self._served = 0.0  # the time of the last successful call
        self._accepted = False  # whether the server has accepted our key
        self._tokens: float | None = None  # computed until the last check
        self._next_check = 0.0  # the time of the next check while calls wait
        self._warned = -math.inf  # the time of the last log line about a busy server

    async def request(self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        """What `read` finds in the answer's JSON, with retries while the server is busy.

        Patience restarts whenever the server answers another request, because this one's turn will come.
        """
        began, tries = 0.0, 0
        while True:
            try:
                response = await self._once(method, path, body)
            except Refused as refused:
                if not self.busy(refused) or (method != "GET" and path.partition("?")[0] not in REPEATABLE):
                    raise
                now, tries = time.monotonic(), tries + 1
                began = max(began or now, self._served)
                left = began + self.patience - now
                if left <= 0:
                    problem = f"{refused}, for {self.patience:g} s (engine.patience)"
                    raise self.gone(problem, KeepsRefusing) from refused
                if now > self._warned + self.patience:
                    self._warned = now
                    logger.warning("%s; repeating the request for %g s (engine.patience)", refused, self.patience)
                await asyncio.sleep(min(retry_delay(tries, FIRST_DELAY, refused.answer), left))
            else:
                return self._read(path, response, read)
            if self.lost:  # found by another call
                raise ServerGone(str(self.lost))

    def busy(self, refused: Refused) -> bool:
        """Whether a retry may succeed."""
        return self.patience > 0 and refused.status in BUSY

    def gone(self, problem: str, kind: type[ServerGone] = ServerGone) -> ServerGone:
        """The error to raise when the server is found lost."""
        self.lost = kind(problem)
        return self.lost

    async def generated(self) -> float:
        """Tokens that the server has generated since its start, for all clients; 0 if unknown."""
        async with self._http() as http:
            return await _tokens_computed(http, GENERATED) or 0.0

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """One attempt, which checks the server while it waits: a dead engine may never answer, a busy one may yet."""
        timeout = ProgressTimeout(self)
        try:
            async with self._http() as http:
                call = asyncio.ensure_future(_after_a_pause(http, method, path, body))
                try:
                    while not (await asyncio.wait({call}, timeout=min(HEARTBEAT, timeout.left)))[0]:
                        await self._check(http, path, timeout)
                finally:
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                response = call.result()
                self.last_sign = time.monotonic()
                if not response.is_success:
                    raise await self._failure(path, response)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise self.gone(f"{self.where} is gone ({path}: {reason}){self.endpoint.cause()}") from error
        self._served, self._accepted = self.last_sign, True
        return response

    def _http(self) -> httpx.AsyncClient:
        """httpx's client: a proxy only for other machines; a timeout only to connect, see `ProgressTimeout`."""
        mask(self.endpoint.api_key, "(the server's key)")
        return httpx.AsyncClient(
            base_url=self.endpoint.url,
            headers={"Authorization": f"Bearer {self.endpoint.api_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            trust_env=not is_loopback(urlsplit(self.endpoint.url).hostname or ""),
            verify=_certificates() if self.endpoint.url.startswith("https") else False,
        )

    async def _check(self, http: httpx.AsyncClient, path: str, timeout: ProgressTimeout) -> None:
        """Raise ServerGone if nothing listens any more, the engine is dead, or the timeout has passed.

        One of the waiting calls checks for all. A pause is a sign of progress for completions, which wait for a sync.
        """
        if time.monotonic() < self._next_check and timeout.left:
            return
        self._next_check = time.monotonic() + HEARTBEAT
        if await _health(http) is False:
            raise self.gone(f"{self.where} died during {path}{self.endpoint.cause()}")
        tokens = await _tokens_computed(http, TOKENS)
        self.paused = path == GENERATE and await _is_paused(http)
        if self.paused or (tokens is not None and self._tokens is not None and tokens != self._tokens):
            self.last_sign = time.monotonic()
        self._tokens = tokens
        if not timeout.left:
            raise self.gone(f"{self.where} did not answer {path}, {timeout.problem}")

    async def _failure(self, path: str, response: httpx.Response) -> EngineError:
        """The error of a failed response: ServerGone if the engine has died or another server took its place."""
        refused = Refused(self.endpoint.url, path, response, _message(response))
        if response.status_code >= 500:
            async with self._http() as new:  # after an error in a route, vLLM closes the connection that asked
                if await _health(new) is not True:
                    return self.gone(f"{refused}{self.endpoint.cause()}")
        replaced = response.status_code == 401 and self._accepted
        return self.gone(str(refused)) if replaced else refused

    def _read(self, path: str, response: httpx.Response, read: Callable[[Any], T]) -> T:
        """Raises EngineError for an answer of an unexpected form, for example a proxy's."""
        try:
            return read(response.json() if "json" in response.headers.get("content-type", "") else None)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"the answer to {path} at {self.endpoint.url} is not from a vLLM server, or invalid"
            raise EngineError(f"{problem}: {type(error).__name__}: {error}") from error


class ProgressTimeout:
    """The timeout of one call: `timeout` seconds without a sign of progress, and `LONGEST` times as much in all."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.timeout, self.began = connection, connection.timeout, time.monotonic()

    @property
    def left(self) -> float:
        """Seconds left if no further sign of progress comes; 0 when the timeout has passed."""
        now = time.monotonic()
        without_sign = max(self.began, self.connection.last_sign) + self.timeout - now
        return max(0.0, min(without_sign, self.began + LONGEST * self.timeout - now))

    @property
    def problem(self) -> str:
        """The end of the error message when the timeout has passed."""
        if time.monotonic() < self.began + LONGEST * self.timeout:
            return f"nor made progress, within {self.timeout:g} s (engine.request_timeout)"
        paused = f": it is paused, {PAUSED_BY}" if self.connection.paused else ""
        return f"within {LONGEST} times engine.request_timeout={self.timeout:g} s{paused}"


async def _after_a_pause(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> httpx.Response:
    """The answer, for which the request waits until the server is not paused, as if the server had held it."""
    while True:
        response = await http.request(method, path, json=body)
        if response.status_code != 503 or PAUSED not in response.text:
            return response
        await asyncio.sleep(PAUSED_DELAY)


async def _health(http: httpx.AsyncClient) -> bool | None:
    """Whether the server runs and its engine lives; None if unknown, since the server may be busy."""
    try:
        response = await request(http, "GET", "/health", CHECK_TIMEOUT)
    except httpx.HTTPError as error:
        return False if isinstance(error, httpx.ConnectError) else None
    return True if response.is_success else False if response.status_code == 503 else None


async def _tokens_computed(http: httpx.AsyncClient, kinds: re.Pattern[str]) -> float | None:
    """Tokens since the server's start, for all of its clients; None if the server does not report them."""
    response = await _answer(http, "/metrics")
    counts = kinds.findall(response.text) if response else []
    return sum(map(float, counts)) if counts else None


async def _is_paused(http: httpx.AsyncClient) -> bool:
    """Whether the server reports that it is paused."""
    response = await _answer(http, "/is_paused")
    try:
        body = response.json() if response else None
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("is_paused") is True


async def _answer(http: httpx.AsyncClient, path: str) -> httpx.Response | None:
    """A successful answer or None: the waiting call and `_health` report the error."""
    try:
        response = await request(http, "GET", path, CHECK_TIMEOUT)
    except httpx.HTTPError:
        return None
    return response if response.is_success else None


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's certificates, read once because reading is slow."""
    return httpx.create_ssl_context()


def _message(response: httpx.Response) -> str:
    """The message in one of vLLM's two error formats, else the answer's first line."""
    try:
        body = response.json()
    except ValueError:
        return response.text.partition("\n")[0][:300].removesuffix(".")
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500].removesuffix(".")
