"""Asking the judge: many requests at a time, each tried again while that may help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from grpocli.errors import ConfigError
from grpocli.rewards.reward import Failure, Sample, Score

if TYPE_CHECKING:
    from grpocli.rewards.judge import Judge

logger = logging.getLogger(__name__)

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Answers after which another try may succeed."""
LONGEST_PAUSE = 30.0
CONNECT = 10.0


def judged(judge: Judge, samples: Sequence[Sample]) -> list[Score]:
    """A score or a Failure for each sample, in order."""
    return asyncio.run(_all(judge, samples))


def refuse_unreachable(judge: Judge) -> None:
    """Raise ConfigError unless something answers at the address; whatever it says."""
    try:
        httpx.get(f"{judge.base_url.rstrip('/')}/models", headers=_headers(judge), timeout=CONNECT)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ConfigError.of("reward.judge.base_url", judge.base_url, f"cannot be reached: {reason}") from error


async def _all(judge: Judge, samples: Sequence[Sample]) -> list[Score]:
    limits = httpx.Limits(max_connections=judge.concurrency)
    timeout = httpx.Timeout(judge.timeout, connect=min(CONNECT, judge.timeout), pool=None)
    turn = asyncio.Semaphore(judge.concurrency)
    async with httpx.AsyncClient(headers=_headers(judge), limits=limits, timeout=timeout) as http:

        async def one(sample: Sample) -> Score:
            async with turn:
                return await _one(judge, http, sample)

        return list(await asyncio.gather(*(one(sample) for sample in samples)))


async def _one(judge: Judge, http: httpx.AsyncClient, sample: Sample) -> Score:
    body = {
        "model": judge.model,
        "messages": judge.question(sample),
        "max_tokens": judge.max_tokens,
        "temperature": judge.temperature,
    }
    problem = ""
    for attempt in range(judge.retries + 1):
        if attempt:
            await asyncio.sleep(min(judge.backoff * 2 ** (attempt - 1), LONGEST_PAUSE))
        try:
            async with asyncio.timeout(judge.timeout):  # also of an answer that comes drop by drop
                response = await http.post(f"{judge.base_url.rstrip('/')}/chat/completions", json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            problem = f"no judgement: {str(error) or type(error).__name__}"
            continue
        if response.status_code in BUSY:
            problem = f"no judgement: {_said(response)}"
            await asyncio.sleep(_wanted_pause(response))
            continue
        if response.is_error:
            return Failure(f"the judge refused: {_said(response)}")
        answer = _content(response)
        score = None if answer is None else judge.score(answer)
        if score is None:
            logger.warning("the judge gave no score: %r", (answer or response.text)[:200])
            return Failure(f"the judge gave no score: {(answer or response.text)[:80]!r}")
        return score
    return Failure(f"{problem}, after {judge.retries + 1} tries")


def _content(response: httpx.Response) -> str | None:
    try:
        found: Any = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _said(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {' '.join(response.text.split())[:120]}".strip()


def _wanted_pause(response: httpx.Response) -> float:
    """Seconds that the endpoint asks for; 0 where it does not, or asks for a date."""
    wanted = response.headers.get("retry-after", "")
    return min(float(wanted), LONGEST_PAUSE) if wanted.isdigit() else 0.0


def _headers(judge: Judge) -> dict[str, str]:
    return {"Authorization": f"Bearer {judge.key}"} if judge.key else {}
