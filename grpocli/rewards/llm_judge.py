"""Asking the judge: many requests at a time, each tried again while that may help."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import httpx

from grpocli.errors import ConfigError
from grpocli.http import BUSY, TooLong, bounded, pause
from grpocli.masking import mask
from grpocli.rewards.reward import Failure, Sample, Score, Unreachable

logger = logging.getLogger(__name__)

CONNECT = 10.0
LARGEST_ANSWER = 4_000_000
"""Bytes; a judgement has a few thousand."""


class Judge(Protocol):
    """The keys of `reward=[judge]`, and its two translations."""

    @property
    def base_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def key(self) -> str | None: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def backoff(self) -> float: ...

    def question(self, sample: Sample) -> list[dict[str, str]]:
        """The messages that the judge gets."""
        ...

    def score(self, answer: str) -> float | None:
        """The score in the judge's answer, if there is one."""
        ...


class Asking:
    """Calls of `judged` that are under way, possibly in several threads, and that a run that ends does not wait for."""

    def __init__(self) -> None:
        self._going: dict[asyncio.Task[list[Score]], asyncio.AbstractEventLoop] = {}

    def judged(self, judge: Judge, samples: Sequence[Sample]) -> list[Score]:
        """A score or a Failure for each sample, in order."""

        async def asked() -> list[Score]:
            task = asyncio.create_task(_all(judge, samples))
            self._going[task] = asyncio.get_running_loop()
            try:
                return await task
            except asyncio.CancelledError:
                return [Failure("no judgement: the run has ended")] * len(samples)
            finally:
                del self._going[task]

        return asyncio.run(asked())

    def close(self) -> None:
        """End what is under way."""
        for task, loop in list(self._going.items()):
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                loop.call_soon_threadsafe(task.cancel)


def refuse_unreachable(judge: Judge) -> None:
    """Raise ConfigError unless something answers at the address; whatever it says."""
    try:
        httpx.get(f"{judge.base_url.rstrip('/')}/models", headers=_headers(judge), timeout=CONNECT)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"cannot be reached: {reason}", key="reward.judge.base_url", value=judge.base_url) from error


async def _all(judge: Judge, samples: Sequence[Sample]) -> list[Score]:
    limits = httpx.Limits(max_connections=judge.concurrency)
    timeout = httpx.Timeout(judge.timeout, connect=min(CONNECT, judge.timeout), pool=None)
    turn = asyncio.Semaphore(judge.concurrency)
    async with httpx.AsyncClient(headers=_headers(judge), limits=limits, timeout=timeout) as http:

        async def one(sample: Sample) -> Score:
            async with turn:
                try:
                    return await _one(judge, http, sample)
                except Exception as error:  # noqa: BLE001 - one sample's fault is not the others'
                    return Failure(f"no judgement: {type(error).__name__}: {error}")

        return list(await asyncio.gather(*(one(sample) for sample in samples)))


async def _one(judge: Judge, http: httpx.AsyncClient, sample: Sample) -> Score:
    body = {
        "model": judge.model,
        "messages": judge.question(sample),
        "max_tokens": judge.max_tokens,
        "temperature": judge.temperature,
    }
    content = json.dumps(body)  # ASCII: a lone surrogate of the data's would not be UTF-8
    problem, answered = "", None
    for tries in range(judge.retries + 1):
        if tries:
            await asyncio.sleep(pause(tries, judge.backoff, answered))
        try:
            async with asyncio.timeout(judge.timeout):  # also of an answer that comes drop by drop
                url = f"{judge.base_url.rstrip('/')}/chat/completions"
                response = await bounded(http, "POST", url, LARGEST_ANSWER, content=content)
        except TooLong as error:
            return Failure(f"the judge gave no score: {error}")
        except (httpx.HTTPError, TimeoutError) as error:
            problem, answered = f"no judgement: {str(error) or type(error).__name__}", None
            continue
        if response.status_code in BUSY:
            problem, answered = f"no judgement: {_said(response)}", response
            continue
        if not response.is_success:
            return Failure(f"the judge refused: {_said(response)}")
        answer = _content(response)
        score = None if answer is None else judge.score(answer)
        if score is None:
            logger.warning("the judge gave no score: %r", (answer or response.text)[:200])
            return Failure(f"the judge gave no score: {(answer or response.text)[:80]!r}")
        return score
    return Unreachable(f"{problem}, after {judge.retries + 1} tries")


def _content(response: httpx.Response) -> str | None:
    try:
        found: Any = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _said(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {' '.join(response.text.split())[:120]}".strip()


def _headers(judge: Judge) -> dict[str, str]:
    if judge.key:
        mask(judge.key, "(the judge's key)")
    key = {"Authorization": f"Bearer {judge.key}"} if judge.key else {}
    return {"Content-Type": "application/json", **key}
