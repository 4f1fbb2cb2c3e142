"""Rewards that only look at the text or its length."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from omegaconf import MISSING

from grpocli.config.formula import Formula
from grpocli.config.parts import follows, part, require
from grpocli.rewards.final_answer import final_answer
from grpocli.rewards.reward import BaseReward, Correctness, Failure, Sample, Score, answer_of

DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
TIMES = r"\*|×|÷|/|\\times|\\cdot|\\div"
# A minus after a word, a digit or a bracket is an operator: 10-5 ends in 5, "= -5" in -5.
TERM = re.compile(
    rf"((?<![\w)\]}}])[-−])?[$€£]?({DIGITS}(?:\s*(?:\^|_|\*\*|{TIMES})\s*[({{]?-?{DIGITS}[)}}]?)*)", re.ASCII
)
FACTOR = re.compile(rf"(\^|_|\*\*|{TIMES})?\s*[({{]?(-?{DIGITS})[)}}]?", re.ASCII)
PART = r"(?:\{((?:[^{}]|\{[^{}]*\})*)\}|(\d))"
FRACTION = re.compile(rf"(?:(?<!\d)(\d+)\s*)?\\[dtc]?frac\s*{PART}\s*{PART}", re.ASCII)
SIGNED = re.compile(r"\s*[-−]?(?:\d+(?:\.\d+)?|\.\d+)\s*", re.ASCII)
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:!]|,\\!)(?=\d{3}(?!\d))", re.ASCII)
DIVIDED = re.compile(r"(?:/|÷|\\div|×|\\times|\\cdot)$")
NO_NUMBER = "1/0 "
"""In the place of a fraction with unknowns or roots."""
MIXED = re.compile(r"(?<![\d./])(\d+)\s+(\d+)()/(\d+)()(?![\d./])", re.ASCII)
LONGEST = 2000
"""Characters at the end of a final answer that are searched."""
LARGEST_BITS = 10_000
"""Of a number: 3,000 digits. Python refuses to write more than 4,300."""


@part("reward", "exact_match", package="reward.exact_match")
class ExactMatch(Correctness):
    """`right` (1) where the final answer, without surrounding space, is the reference's text; else `wrong` (0)."""

    answer_forms = ("boxed", "tag", "####")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        answer = answer_of(sample, self.answer_column)
        if isinstance(answer, Failure):
            return answer
        return self.value(final_answer(sample.text) in (answer.strip(), final_answer(answer)))


@part("reward", "number", package="reward.number")
class Number(Correctness):
    """`right` (1) where the last number of the final answer equals that of the reference; else `wrong` (0).

    A fraction, a power or a product of numbers is one number: 3/2 is 1.5 and does not end in 2.
    """

    answer_forms = ("boxed", "tag", "####", "sentence", "decimal", "fraction")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        answer = answer_of(sample, self.answer_column)
        if isinstance(answer, Failure):
            return answer
        reference = last_number(final_answer(answer))
        if reference is None:
            return Failure(f"there is no number in the answer {answer!r}")
        return self.value(last_number(final_answer(sample.text)) == reference)

    def vote(self, sample: Sample) -> str:
        return str(last_number(final_answer(sample.text)))


def last_number(text: str) -> Fraction | None:
    """The last number written in digits; commas between thousands are ignored, and so is a currency sign.

    None without one, and where the last one is under a root, in a fraction with a root or letter, or too
    large. Indices and the powers of letters, as in
    cm^2, are not numbers.
    """
    text = SEPARATOR.sub("", text[-LONGEST:])
    text = MIXED.sub(_fraction, FRACTION.sub(_fraction, text))
    for found in reversed(list(TERM.finditer(text))):
        before = text[: found.start()].rstrip(" {(")
        if before.endswith(("^", "_")):
            continue
        if before.endswith("\\sqrt") or (before.endswith("]") and "\\sqrt[" in before[-9:]):
            return None
        if DIVIDED.search(before):
            return None  # of a root or a letter
        value = _product(found[2])
        return -value if value is not None and found[1] else value
    return None


def _fraction(found: re.Match[str]) -> str:
    """1\\frac{1}{2} and 1 1/2 as 3/2."""
    above, below = found[2] or found[3], found[4] or found[5]
    if not (SIGNED.fullmatch(above) and SIGNED.fullmatch(below)):
        return NO_NUMBER
    over, under = (Fraction(one.replace("−", "-").strip()) for one in (above, below))
    if not under or (found[1] and (over < 0 or under < 0)):
        return NO_NUMBER
    value = int(found[1] or 0) + over / under
    return f"{value.numerator}/{value.denominator} "


def _product(term: str) -> Fraction | None:
    """The product of numbers with signs of multiplication, division or powers between them, from left to right.

    None where it is too large, or divides by 0.
    """
    factors: list[Fraction] = []
    for operator, digits in FACTOR.findall(term):
        number = Fraction(digits.replace(",", ""))
        if operator in ("/", "÷", "\\div"):
            if not number:
                return None
            number = 1 / number
        elif operator in ("^", "**", "_"):
            if (raised := _raised(factors.pop(), operator, number)) is None:
                return None
            number = raised
        factors.append(number)
    product = math.prod(factors, start=Fraction(1))
    return product if _bits(product) <= LARGEST_BITS else None


def _raised(base: Fraction, operator: str, number: Fraction) -> Fraction | None:
    """A power, or the value of a numeral in base `number`; None where it is neither, or too large."""
    if number.denominator != 1:
        return None
    if operator == "_":
        try:
            return Fraction(int(str(base), int(number)))
        except (ValueError, OverflowError):
            return None
    if abs(number) * _bits(base) > LARGEST_BITS or (not base and number < 0):
        return None
    return base ** int(number)


def _bits(number: Fraction) -> int:
    """Bits of the numerator or the denominator, whichever has more."""
    return max(number.numerator.bit_length(), number.denominator.bit_length())


@part("reward", "length", package="reward.length")
class Length(BaseReward):
    """1 if the completion has `target` tokens, falling linearly to 0 at `width` tokens more or fewer."""

    target: int = MISSING
    """Tokens of a completion that scores 1."""
    width: int = 64
    """Tokens from `target` to a score of 0."""

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
    """DAPO's soft punishment of long completions (arXiv 2503.14476), equation 13.

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens, and -1 beyond.
    """

    max_tokens: int | None = follows("rollout.max_completion_tokens")
    """Tokens at which the score is -1. null: the limit that the sample was cut at."""
    buffer_tokens: int | None = None
    """Tokens before max_tokens over which the score falls. null: a fifth of max_tokens, as in the paper (4096 of
    20480)."""

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
