"""Rule-based rewards: math, exact_match and number compare the answer with the row's; format matches the completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from grpocli.config.parts import check_regex, part, require
from grpocli.rewards.reward import (
    BaseReward,
    Correctness,
    Failure,
    Forfeit,
    Sample,
    Score,
    answer_text,
    answers_of,
    best_of,
)
from grpocli.rewards.worker_pool import WorkerPool, score_items, shared_pool

DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
# a minus after a word, a digit or a bracket is an operator: 10-5 ends in 5, "= -5" in -5
NUMBER = re.compile(rf"((?<![\w)\]}}])[-−])?[$€£]?({DIGITS})(?:\s*/\s*({DIGITS}))?", re.ASCII)
COMPUTED = re.compile(
    r"(?:/|÷|\\div|×|\\times|\\cdot|\d[)}]?[ \t]*\*|\d[ \t]*\*\*|\\sqrt(?:\[[^]]{0,8}\])?|\d[)\]}]?\s*[\^_])$", re.ASCII
)
"""What before a number makes it a part of a root, a power, a numeral, a product or a quotient.

A bullet or bold digits on a new line are no product, and the exponent of a unit in braces is no power.
"""
PART = r"(?:\{((?:[^{}]|\{[^{}]*\})*)\}|(\d))"
FRACTION = re.compile(rf"(?:(?<!\d)(\d+)\s*)?\\[dtc]?frac\s*{PART}\s*{PART}", re.ASCII)
SIGNED = re.compile(r"\s*[-−]?(?:\d+(?:\.\d+)?|\.\d+)\s*", re.ASCII)
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:!]|,\\!)(?=\d{3}(?!\d))", re.ASCII)
NO_NUMBER = "1/0 "
"""Replaces a fraction with unknowns or roots."""
MIXED = re.compile(r"(?<![\d./])(\d+)\s+(\d+)()/(\d+)()(?![\d./])", re.ASCII)
LONGEST = 2000
"""Characters at the end of a final answer that are searched."""


@part("reward", "math", package="reward.math")
class Math(Correctness):
    r"""`right` (1) if the final answer equals the reference mathematically (math-verify), else `wrong` (0).

    The final answer is the content of the last \boxed{}, else of the last <answer>, else what follows "####", else the
    last expression after the thinking part. The reference is a number, LaTeX, or ends in "#### 42".
    """

    scores_independently = True
    answer_forms = ("boxed", "tag", "####", "sentence", "decimal", "fraction")
    require_evaluated: bool = True
    r"""If the reference is a number, count a sum, a product or a call such as \binom as wrong even if its value is
    right. Fractions, roots, powers and constants are values."""
    timeout: float = 5.0
    """Seconds for a sample. A completion that takes longer is wrong; a reference that takes longer, or is empty, is a
    failure."""
    workers: int = 0
    """Worker processes; 0: one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def check(self, columns: Sequence[str]) -> None:
        super().check(columns)
        self._pool().start()

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        answers = [answers_of(sample, self.answer_column) for sample in samples]
        pairs = [(i, answer_text(one)) for i, known in enumerate(answers) if isinstance(known, list) for one in known]
        items = [[answer, samples[i].text, self.require_evaluated] for i, answer in pairs]
        references = [[answer, None] for _, answer in pairs]
        scores: list[list[Score]] = [[one] if isinstance(one, Failure) else [] for one in answers]
        for (i, _), score in zip(pairs, score_items(self._pool(), items, references), strict=True):
            if not isinstance(score, Failure):
                score = Forfeit(self.wrong, score.reason) if isinstance(score, Forfeit) else self.value(score == 1)
            scores[i].append(score)
        return [best_of(one) for one in scores]

    def votes(self, samples: Sequence[Sample]) -> list[str]:
        """The answers; answers of equal value get the same text, so that 0.5 and \\frac{1}{2} are one answer."""
        from grpocli.answers.final_answer import answer_expression  # slow: their patterns are compiled
        from grpocli.answers.math_text import plain_number

        answers = [answer_expression(sample.text) for sample in samples]
        values = {text: plain_number(text) for text in answers}
        first: dict[Fraction | str, str] = {}
        texts = [first.setdefault(text if (value := values[text]) is None else value, text) for text in answers]
        others = [text for text in first.values() if values[text] is None]
        parsed = self._pool().map([[text, None] for text in others])
        alone = {text for text, score in zip(others, parsed, strict=True) if isinstance(score, Failure)}
        votes: dict[str, str] = {}
        for text in first.values():  # one that is empty, or not read in time, is equal only to itself
            known = [one for one in dict.fromkeys(votes.values()) if not alone & {one, text}]
            known = [one for one in known if None in (values[one], values[text])]  # numbers in digits differ
            same = self._pool().map([[one, text, False] for one in known])
            votes[text] = next((one for one, score in zip(known, same, strict=True) if score == 1), text)
        return [votes[text] for text in texts]

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> WorkerPool:
        return shared_pool("grpocli.answers.math_worker:equal", self.workers, self.timeout)


@part("reward", "exact_match", package="reward.exact_match")
class ExactMatch(Correctness):
    """`right` (1) if the final answer, without surrounding space, is the text of the reference, else `wrong` (0).

    A reference that is a number in the data compares as a number, `true` and `false` in upper or lower case.
    """

    answer_forms = ("boxed", "tag", "####")

    def score_sample(self, sample: Sample) -> Score:
        from grpocli.answers.final_answer import final_answer  # slow: its patterns are compiled

        score, whole = super().score_sample(sample), sample.columns.get(self.answer_column)
        # the text of a list of accepted answers may be the list that a task asks for
        is_whole = isinstance(whole, str) and final_answer(sample.text) == whole
        return self.right if score == self.wrong and is_whole else score

    def score_answer(self, sample: Sample, answer: Any) -> Score:
        from grpocli.answers.final_answer import final_answer
        from grpocli.answers.math_text import plain_number, rounded_equal

        given, text = final_answer(sample.text), answer_text(answer)
        if isinstance(answer, bool):
            return self.value(given.lower() == text)
        if isinstance(answer, int | float | Decimal) and (number := plain_number(given)) is not None:
            return self.value(rounded_equal(number, Fraction(text)))
        return self.value(given in (text.strip(), final_answer(text)))


@part("reward", "number", package="reward.number")
class Number(Correctness):
    """`right` (1) if the last number of the final answer equals the last number of the reference, else `wrong` (0).

    A fraction is one number: 3/2 is 1.5 and does not end in 2. An answer that ends in a power or a product is wrong.
    """

    answer_forms = ("boxed", "tag", "####", "sentence", "decimal", "fraction")

    def score_answer(self, sample: Sample, answer: Any) -> Score:
        from grpocli.answers.final_answer import final_answer

        if (reference := last_number(final_answer(answer_text(answer)))) is None:
            return Failure(f"there is no number in the answer {answer!r}")
        return self.value(last_number(final_answer(sample.text)) == reference)

    def vote(self, sample: Sample) -> str:
        return str(last_number(super().vote(sample)))


def last_number(text: str) -> Fraction | None:
    """The last number written in digits, also as a fraction; commas between thousands and currency signs are ignored.

    None if there is no number, or if the last one is a part of a root, a power, a numeral, a product or a quotient.
    Indices and exponents of letters, as in cm^2, are not numbers.
    """
    text = SEPARATOR.sub("", text[-LONGEST:])
    text = MIXED.sub(_fraction, FRACTION.sub(_fraction, text))
    for found in reversed(list(NUMBER.finditer(text))):
        before = text[: found.start()].rstrip(" {(")
        if COMPUTED.search(before[-20:]):
            return None
        if before.endswith(("^", "_")):
            continue
        above, below = (Fraction((digits or "1").replace(",", "")) for digits in found.groups()[1:])
        return (-above if found[1] else above) / below if below else None
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


@part("reward", "format", package="reward.format")
class Format(BaseReward):
    """1 if the whole completion matches a regular expression (`.` matches newlines too), else 0."""

    scores_independently = True
    pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>"
    """Regular expression for the whole completion."""
    timeout: float = 5.0
    """Seconds for a sample, since some patterns take exponential time; a completion that takes longer scores 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_regex(self, "pattern")
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        items = [[self.pattern, sample.text] for sample in samples]
        return score_items(self._pool(), items, [[self.pattern, ""] for _ in samples])

    @property
    def wants_opened_thought(self) -> bool:
        """Whether a completion must write the first <think> itself."""
        thought = "a</think>\n<answer>a</answer>"
        return bool(match(self.pattern, f"<think>{thought}") and not match(self.pattern, thought))

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> WorkerPool:
        return shared_pool("grpocli.rewards.rule_based:match", 1, self.timeout)


def match(pattern: str, text: str) -> float:
    """1 if the whole text, without surrounding space, matches, else 0. Runs in a worker process."""
    return float(re.fullmatch(pattern, text.strip(), flags=re.DOTALL) is not None)
