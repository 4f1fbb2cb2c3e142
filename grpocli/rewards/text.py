"""Rewards that only look at the text or its length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from omegaconf import MISSING

from grpocli.config.formula import Formula
from grpocli.config.parts import follows, part, require
from grpocli.rewards.reward import BaseReward, Correctness, Failure, Sample, Score, answer_of

# A minus after a word, a digit or a bracket is an operator: 10-5 ends in 5, "= -5" in -5.
NUMBER = re.compile(r"((?<![\w)\]])[-−])?[$€£]?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


@part("reward", "exact_match", package="reward.exact_match")
class ExactMatch(Correctness):
    """`right` (1) where the completion, without surrounding space, is the answer; else `wrong` (0)."""

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        answer = answer_of(sample, self.answer_column)
        return answer if isinstance(answer, Failure) else self.value(sample.text.strip() == answer.strip())


@part("reward", "number", package="reward.number")
class Number(Correctness):
    """`right` (1) where the last number in the completion equals the last number in the answer; else `wrong` (0)."""

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        answer = answer_of(sample, self.answer_column)
        if isinstance(answer, Failure):
            return answer
        reference = last_number(answer)
        if reference is None:
            return Failure(f"there is no number in the answer {answer!r}")
        return self.value(last_number(sample.text) == reference)

    def vote(self, sample: Sample) -> str:
        return str(last_number(sample.text))


def last_number(text: str) -> Decimal | None:
    """The last number written in digits; commas between thousands are ignored, and so is a currency sign."""
    found = NUMBER.findall(text)
    if not found:
        return None
    minus, digits = found[-1]
    value = Decimal(digits.replace(",", ""))
    return value.copy_negate() if minus else value


@part("reward", "length", package="reward.length")
class Length(BaseReward):
    """1 where the completion has `target` tokens, falling in a line to 0 at `width` tokens more or fewer."""

    target: int = MISSING
    width: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "target", self.target >= 1, "must be at least 1")
        require(self, "width", self.width >= 1, "must be at least 1")

    def formula(self) -> Formula:
        return Formula(
            ("a wanted length", "R_length = max(0, 1 − |l_i − l| / w)", "l_i: o_i's tokens"),
            {"l": "target", "w": "width"},
        )

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [max(0.0, 1 - abs(sample.n_tokens - self.target) / self.width) for sample in samples]


@part("reward", "overlong", package="reward.overlong")
class Overlong(BaseReward):
    """DAPO's soft punishment (arXiv 2503.14476), equation 13.

    0 up to max_tokens - buffer_tokens, then falling in a line to -1 at max_tokens, and -1 beyond.
    max_tokens: the limit, `rollout.max_completion_tokens` unless given; null is what the sample was cut at.
    buffer_tokens: null is a fifth of that, as in the paper (4096 of 20480).
    """

    max_tokens: int | None = follows("rollout.max_completion_tokens")
    buffer_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        require(self, "buffer_tokens", self.buffer_tokens is None or self.buffer_tokens >= 1, "must be at least 1")
        if self.max_tokens is not None and self.buffer_tokens is not None:
            require(
                self,
                "buffer_tokens",
                self.buffer_tokens <= self.max_tokens,
                f"must be at most reward.overlong.max_tokens={self.max_tokens}",
            )

    def formula(self) -> Formula:
        return Formula(
            (
                "a soft punishment of length",
                "R_overlong = min(0, max(−1, (l_max − l_buf − l_i) / l_buf))",
                "l_i: o_i's tokens;  l_buf null: max(1, ⌊l_max / 5⌋)",
            ),
            {"l_max": "max_tokens", "l_buf": "buffer_tokens"},
            ("DAPO (arXiv 2503.14476), equation 13",),
        )

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        limit = self.max_tokens or sample.max_tokens
        buffer = min(self.buffer_tokens or max(1, limit // 5), limit)
        return min(0.0, max(-1.0, (limit - buffer - sample.n_tokens) / buffer))
