"""A client of an OpenAI-compatible chat endpoint: concurrent requests, with retries while the endpoint is busy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from grpocli.http import BUSY, TooLong, bounded, fetch, json_of, retry_delay
from grpocli.masking import mask
from grpocli.rewards.reward import Failure, Unreachable

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]

CONNECT_TIMEOUT = 10.0
LARGEST_RESPONSE = 4_000_000
"""Bytes of an answer; a judgement has a few thousand."""


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A client of one endpoint. Several threads may call `answers`; `close` ends all of their requests.

    base_url: ends with `/v1`. key: of the endpoint. body: fields of every request besides the messages. concurrency:
    requests at a time. timeout: seconds for one. retries: further attempts. backoff: seconds before the first retry;
    each pause is twice as long as the one before.
    """

    base_url: str
    key: str | None
    body: Mapping[str, Any]
    concurrency: int
    timeout: float
    retries: int
    backoff: float
    _running: dict[asyncio.Task[list[str | Failure]], asyncio.AbstractEventLoop] = field(default_factory=dict)

    def answers(self, conversations: Sequence[Messages]) -> list[str | Failure]:
        """The endpoint's answer to each conversation, in order, or a Failure with the reason."""

        async def ask_all() -> list[str | Failure]:
            task = asyncio.create_task(self._ask_all(conversations))
            self._running[task] = asyncio.get_running_loop()
            try:
                return await task
            except asyncio.CancelledError:
                return [Failure("no judgement: the run has ended")] * len(conversations)
            finally:
                del self._running[task]

        return asyncio.run(ask_all())

    def close(self) -> None:
        """Cancel running requests, so that a run that ends does not wait for them."""
        for task, loop in list(self._running.items()):
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                loop.call_soon_threadsafe(task.cancel)

    def unreachable(self) -> str:
        """The reason why the endpoint does not answer; empty if it does, with any status."""
        try:
            fetch(f"{self.base_url.rstrip('/')}/models", LARGEST_RESPONSE, CONNECT_TIMEOUT, self._headers())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return str(error) or type(error).__name__
        return ""

    async def _ask_all(self, conversations: Sequence[Messages]) -> list[str | Failure]:
        limits = httpx.Limits(max_connections=self.concurrency)
        timeout = httpx.Timeout(self.timeout, connect=min(CONNECT_TIMEOUT, self.timeout), pool=None)
        slots = asyncio.Semaphore(self.concurrency)
        async with httpx.AsyncClient(headers=self._headers(), limits=limits, timeout=timeout) as http:

            async def one(messages: Messages) -> str | Failure:
                async with slots:
                    try:
                        return await self._ask(http, messages)
                    except Exception as error:  # noqa: BLE001 - one request's error must not fail the others
                        return Failure(f"no judgement: {type(error).__name__}: {error}")

            return list(await asyncio.gather(*(one(messages) for messages in conversations)))

    async def _ask(self, http: httpx.AsyncClient, messages: Messages) -> str | Failure:
        content = json.dumps({**self.body, "messages": messages})  # ASCII, since a lone surrogate is not valid UTF-8
        problem, busy = "", None
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(retry_delay(attempt, self.backoff, busy))
            try:
                url = f"{self.base_url.rstrip('/')}/chat/completions"
                response = await bounded(http, "POST", url, LARGEST_RESPONSE, self.timeout, content=content)
            except TooLong as error:
                return Failure(f"the judge gave no score: {error}")
            except httpx.HTTPError as error:
                problem, busy = f"no judgement: {str(error) or type(error).__name__}", None
                continue
            if response.status_code in BUSY:
                problem, busy = f"no judgement: {_summary(response)}", response
                continue
            if not response.is_success:
                return Failure(f"the judge refused: {_summary(response)}")
            return _answer(response)
        return Unreachable(f"{problem}, after {self.retries + 1} tries")

    def _headers(self) -> dict[str, str]:
        if self.key:
            mask(self.key, "(the judge's key)")
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}


def _answer(response: httpx.Response) -> str | Failure:
    try:
        found: Any = json_of(response)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        found = None
    if isinstance(found, str):
        return found
    logger.warning("the judge gave no score: %r", response.text[:200])
    return Failure(f"the judge gave no score: {response.text[:80]!r}")


def _summary(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {' '.join(response.text.split())[:120]}".strip()
