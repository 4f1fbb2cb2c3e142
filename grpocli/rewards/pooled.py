"""Rewards that are computed in killable worker processes: mathematics and regular expressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache

from grpocli.config.parts import part, regular, require
from grpocli.rewards.pool import Pool, default_workers
from grpocli.rewards.reward import BaseReward, Correctness, Failure, Sample, Score, answer_of
from grpocli.rewards.text import last_number

FINAL, BOX = "####", "\\boxed{"


def last_box(text: str) -> str | None:
    """What stands in the last \\boxed{}, with the braces inside of it; None without one that is closed."""
    _, found, rest = text.rpartition(BOX)
    depth = 1
    for place, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place].strip()
    return None


@lru_cache(maxsize=8)
def pool_of(function: str, workers: int, timeout: float) -> Pool:
    return Pool(function, workers or default_workers(), timeout)


@part("reward", "math", package="reward.math")
class Math(Correctness):
    """`right` (1) where the completion's answer equals the reference mathematically (math-verify), else `wrong` (0).

    The answer is what is in the last \\boxed{}, else what follows "####", else the last expression. The reference is
    a number, LaTeX, or ends in "#### 42". timeout: seconds for a sample; one that takes longer, or a reference that
    cannot be read, is a failure and no 0. workers: 0 is one for each core.
    """

    has_processes = True
    timeout: float = 5.0
    workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def check(self, columns: Sequence[str]) -> None:
        super().check(columns)
        self._pool().start()

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        answers = [answer_of(sample, self.answer_column) for sample in samples]
        known = [i for i, answer in enumerate(answers) if isinstance(answer, str)]
        scores: list[Score] = [a if isinstance(a, Failure) else None for a in answers]
        for i, score in zip(known, self._pool().map([[answers[i], samples[i].text] for i in known]), strict=True):
            scores[i] = score if isinstance(score, Failure) else self.value(score == 1)
        return scores

    def vote(self, sample: Sample) -> str:
        """What is in the last box, else what follows "####", else the last number, else the text."""
        if (box := last_box(sample.text)) is not None:
            return box
        if FINAL in sample.text:
            return sample.text.rpartition(FINAL)[2].strip()
        number = last_number(sample.text)
        return sample.text.strip() if number is None else str(number)

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> Pool:
        return pool_of("grpocli.rewards.mathematics:equal", self.workers, self.timeout)


@part("reward", "format", package="reward.format")
class Format(BaseReward):
    """1 where the whole completion matches a regular expression (`.` matches newlines too), else 0.

    timeout: seconds for a sample, since some patterns take exponential time.
    """

    has_processes = True
    pattern: str = field(default=r"<think>.*?</think>\s*<answer>.*?</answer>")
    timeout: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        regular(self, "pattern")
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return list(self._pool().map([[self.pattern, sample.text] for sample in samples]))

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> Pool:
        return pool_of("grpocli.rewards.checks:match", 1, self.timeout)
