"""reward=[judge]: a language model behind an OpenAI-compatible endpoint says how good a completion is."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from omegaconf import MISSING

from grpocli.config.parts import Escaped, nearest, part, regular, require
from grpocli.errors import ConfigError
from grpocli.rewards.reward import BaseReward, Sample, Score

if TYPE_CHECKING:
    from grpocli.rewards.llm_judge import Asking

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
    """The number that the judge's answer ends with, clipped to `low` and `high`.

    base_url: up to and with `/v1`. model: as the endpoint calls it. prompt: what the judge is asked, with {prompt},
    {completion} and any column of the task in braces. system: its system message. pattern: a regular expression whose
    first group is the score; the last match counts.
    api_key: the environment variable that has the key, if the endpoint wants one.
    max_tokens, temperature: of the judge's answer. concurrency: requests at a time. timeout: seconds for one. retries:
    further tries, each twice as long after the one before, where the endpoint is busy, breaks off or is silent.
    A completion that no judgement could be had of, or one without a score, is a failure: masked and counted, no 0.
    """

    verifiable = True
    has_processes = True
    base_url: str = MISSING
    model: str = MISSING
    prompt: Escaped = PROMPT
    system: Escaped | None = None
    pattern: str = r"(?i)score[^\w.]*?([-+]?(?:\d*\.\d+|\d+))"
    low: float = 0.0
    high: float = 1.0
    api_key: str = "OPENAI_API_KEY"
    max_tokens: int = 512
    temperature: float = 0.0
    concurrency: int = 32
    timeout: float = 60.0
    retries: int = 4
    backoff: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parts = urlsplit(self.base_url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # brackets that do not match
            known = False
        require(self, "base_url", known, "must be a URL such as http://127.0.0.1:8000/v1")
        regular(self, "pattern", group="the score")
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
        """What is in braces. Raises ConfigError where the braces do not match."""
        from grpocli.tasks.dataset import template_fields

        return template_fields(self.prompt, "reward.judge.prompt")

    def check(self, columns: Sequence[str]) -> None:
        from grpocli.rewards.llm_judge import refuse_unreachable

        given = {"prompt", "completion", *columns}
        for name in self.fields:
            if name not in given:
                problem = f"wants {{{name}}}, but the task has no such column{nearest(name, given)}"
                raise ConfigError(problem, key="reward.judge.prompt", value=repr(self.prompt[:60]))
        refuse_unreachable(self)

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return self._asking.judged(self, samples)

    def close(self) -> None:
        self._asking.close()

    @cached_property
    def _asking(self) -> Asking:
        from grpocli.rewards.llm_judge import Asking

        return Asking()

    def question(self, sample: Sample) -> list[dict[str, str]]:
        """The messages that the judge gets."""
        values = {name: sample.columns.get(name) for name in self.fields}
        values |= {"prompt": _text(sample.prompt), "completion": _text(sample.completion)}
        asked = {"role": "user", "content": self.prompt.format(**values)}
        return [asked] if self.system is None else [{"role": "system", "content": self.system}, asked]

    def score(self, answer: str) -> float | None:
        """None where there is no score in the judge's answer."""
        found = re.findall(self.pattern, answer)
        if not found:
            return None
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        try:
            score = float(last)
        except ValueError:
            return None
        return None if math.isnan(score) else min(max(score, self.low), self.high)

    @property
    def key(self) -> str | None:
        """From the environment; never in a config, a log or a message."""
        return os.environ.get(self.api_key)


def _text(value: object) -> str:
    """A conversation as text: what was said in it."""
    if isinstance(value, list):
        if len(value) == 1:
            return str(value[0]["content"])
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return str(value)
