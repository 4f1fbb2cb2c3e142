"""reward=[judge]: a language model behind an OpenAI-compatible endpoint scores each completion."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from omegaconf import MISSING

from grpocli.config.parts import ByColumn, Escaped, check_regex, nearest, part, require, template_fields
from grpocli.errors import ConfigError, config_errors
from grpocli.http import BUSY, answered, fetch, is_server_url, request
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score, Unreachable
from grpocli.text import mask

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
"""Seconds to connect to the endpoint."""

PROMPT = """\
You judge answers. Compare the answer with the reference, and end with "Score: 1" where it is right, "Score: 0" where it
is not.

Question:
{prompt}

Reference:
{answer}

Answer:
{completion}
"""


@part("reward", "judge", package="reward.judge")
class Judge(BaseReward):
    """The number at the end of an LLM judge's answer, clipped to `low` and `high`.

    A completion whose judgement fails or has no score is a failure: masked and counted, not a 0.
    """

    repeatable = False
    checks_answers = True
    scores_independently = True
    base_url: str = MISSING
    """URL of an OpenAI-compatible endpoint, up to and with `/v1`."""
    model: str = MISSING
    """Name of the judge's model at the endpoint."""
    prompt: Escaped = PROMPT
    """Question to the judge, with {prompt}, {completion} and any column of the task in braces."""
    system: Escaped | None = None
    """System message of the judge; null: none."""
    pattern: str = r"(?i)score[^\w.]*?([-+]?(?:\d*\.\d+|\d+))"
    """Regular expression whose first group is the score; the last match counts."""
    low: float = 0.0
    """Lowest score."""
    high: float = 1.0
    """Highest score."""
    api_key: str = "OPENAI_API_KEY"
    """Name of the environment variable with the API key, if the endpoint needs one."""
    max_tokens: int = 512
    """Most tokens of the judge's answer."""
    temperature: float = 0.0
    """Sampling temperature of the judge's answer."""
    concurrency: int = 32
    """Requests at a time."""
    timeout: float = 60.0
    """Seconds for a request."""
    retries: int = 4
    """Retries if the endpoint is busy, disconnects or does not answer; each pause is twice as long as the last."""
    backoff: float = 0.5
    """Seconds before the first retry."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "base_url", is_server_url(self.base_url), "must be a URL such as http://127.0.0.1:8000/v1")
        check_regex(self, "pattern", group="the score")
        require(self, "high", -math.inf < self.low < self.high < math.inf, f"must be above reward.judge.low={self.low}")
        require(self, "max_tokens", self.max_tokens >= 1, "must be at least 1")
        require(self, "temperature", self.temperature >= 0, "must be 0 or more")
        require(self, "concurrency", self.concurrency >= 1, "must be at least 1")
        require(self, "timeout", 0 < self.timeout < math.inf, "must be above 0 seconds")
        require(self, "retries", self.retries >= 0, "must be 0 or more")
        require(self, "backoff", 0 <= self.backoff < math.inf, "must be 0 seconds or more")

    @property
    def label(self) -> str:
        return f"{self.model} at {self.base_url}"

    @property
    def fields(self) -> list[str]:
        """The names in braces in the prompt. Raises ConfigError if the braces do not match."""
        return template_fields(self.prompt, "reward.judge.prompt")

    def check(self, columns: Sequence[str]) -> None:
        given = {"prompt", "completion", *columns}
        for name in self.fields:
            if name not in given:
                problem = f"uses {{{name}}}, but the task has no such column{nearest(name, given)}"
                raise ConfigError(problem, key="reward.judge.prompt", value=repr(self.prompt[:60]))
        with config_errors(Exception, says="cannot be reached: {}", key="reward.judge.base_url", value=self.base_url):
            fetch(f"{self.base_url.rstrip('/')}/models", CONNECT_TIMEOUT, self._headers)

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        async def ask_all() -> list[Score]:
            task = asyncio.create_task(self._ask_all([self._question(sample) for sample in samples]))
            self._running[task] = asyncio.get_running_loop()
            try:
                return await task
            except asyncio.CancelledError:
                return [Failure("no judgement: the run has ended")] * len(samples)
            finally:
                del self._running[task]

        return asyncio.run(ask_all())

    def close(self) -> None:
        """Cancel running requests, so that a run that ends does not wait for them."""
        for task, loop in list(self._running.items()):
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                loop.call_soon_threadsafe(task.cancel)

    @cached_property
    def _running(self) -> dict[asyncio.Task[list[Score]], asyncio.AbstractEventLoop]:
        """The requests of each thread that calls the reward."""
        return {}

    @cached_property
    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key):  # never in a config, a log or a message
            mask(key, "(the judge's key)")
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _question(self, sample: Sample) -> str:
        """The body of the request; in ASCII, since a lone surrogate is not valid UTF-8."""
        values = {name: sample.columns.get(name) for name in self.fields}
        values |= {"prompt": _text(sample.prompt), "completion": _text(sample.completion)}
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": ByColumn().format(self.prompt, **values)})
        body = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return json.dumps({**body, "messages": messages})

    async def _ask_all(self, questions: Sequence[str]) -> list[Score]:
        import httpx

        slots = asyncio.Semaphore(self.concurrency)
        limits = httpx.Limits(max_connections=self.concurrency)
        timeout = httpx.Timeout(self.timeout, connect=min(CONNECT_TIMEOUT, self.timeout), pool=None)
        async with httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout) as http:

            async def one(question: str) -> Score:
                async with slots:
                    try:
                        return await self._ask(http, question)
                    except Exception as error:  # noqa: BLE001 - one request's error must not fail the others
                        return Failure(f"no judgement: {type(error).__name__}: {error}")

            return list(await asyncio.gather(*map(one, questions)))

    async def _ask(self, http: httpx.AsyncClient, question: str) -> Score:
        import httpx

        url, tries = f"{self.base_url.rstrip('/')}/chat/completions", self.retries + 1
        try:
            response = await answered(
                lambda: request(http, "POST", url, self.timeout, content=question),
                self.backoff,
                retries=self.retries,
                busy_retries=self.retries,
            )
        except httpx.HTTPError as error:
            return Unreachable(f"no judgement: {str(error) or type(error).__name__}, after {tries} tries")
        if response.is_success:
            return self._score(response)
        problem = f"HTTP {response.status_code} {' '.join(response.text.split())[:120]}".strip()
        if response.status_code in BUSY:
            return Unreachable(f"no judgement: {problem}, after {tries} tries")
        return Failure(f"the judge refused: {problem}")

    def _score(self, response: httpx.Response) -> Score:
        """The score in the judge's answer."""
        answer = response.text
        with contextlib.suppress(ValueError, LookupError, TypeError):
            answer = str(response.json()["choices"][0]["message"]["content"])
            last = re.findall(self.pattern, answer)[-1]
            score = float(last if isinstance(last, str) else last[0])
            if not math.isnan(score):
                return min(max(score, self.low), self.high)
        logger.warning("the judge gave no score: %r", answer[:200])
        return Failure(f"the judge gave no score: {answer[:80]!r}")


def _text(value: object) -> str:
    """A text as it is; a conversation as the text of its messages."""
    if isinstance(value, list):
        if len(value) == 1:
            return str(value[0]["content"])
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return str(value)
