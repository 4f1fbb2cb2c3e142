"""Rewards that are computed in killable worker processes: mathematics and regular expressions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

from grpocli.config.parts import part, regular, require
from grpocli.rewards.answer_text import plain_equal, written
from grpocli.rewards.final_answer import answer_expression
from grpocli.rewards.pool import Pool, default_workers
from grpocli.rewards.reward import BaseReward, Correctness, Failure, Forfeit, Overrun, Sample, Score, answer_of


@lru_cache(maxsize=8)
def pool_of(function: str, workers: int, timeout: float) -> Pool:
    return Pool(function, workers or default_workers(), timeout)


def scored_alone(pool: Pool, items: Sequence[Any], alone: Sequence[Any]) -> list[Any]:
    """For each item what the pool returns, or a Failure; a Forfeit of 0 where the completion takes too long.

    alone: each item without its completion. An item that takes too long is tried again that way: if this fails too, the
    fault is in the data, and the score is a Failure.
    """
    found = _distinct(pool, items)
    late = [i for i, score in enumerate(found) if isinstance(score, Overrun)]
    for i, score in zip(late, _distinct(pool, [alone[i] for i in late]), strict=True):
        found[i] = score if isinstance(score, Failure) else Forfeit(0.0, found[i].reason)
    return found


def _distinct(pool: Pool, items: Sequence[Any]) -> list[Any]:
    """What the pool returns for each item; those that are alike are asked once."""
    keys = [json.dumps(item) for item in items]
    asked = dict(zip(keys, items, strict=True))
    answers = dict(zip(asked, pool.map(list(asked.values())), strict=True))
    return [answers[key] for key in keys]


@part("reward", "math", package="reward.math")
class Math(Correctness):
    r"""`right` (1) if the final answer equals the reference mathematically (math-verify), else `wrong` (0).

    The final answer is the content of the last \boxed{}, else of the last <answer>, else what follows "####", else the
    last expression after the thinking part. The reference is a number, LaTeX, or ends in "#### 42".
    """

    has_processes = True
    answer_forms = ("boxed", "tag", "####", "sentence", "decimal", "fraction")
    require_evaluated: bool = True
    r"""If the reference is a number, count a sum, a product or a call such as \binom as wrong even if its value is
    right. Fractions, roots, powers and constants are values."""
    timeout: float = 5.0
    """Seconds for a sample. A completion that takes longer is wrong; a reference that takes longer, or cannot be read,
    is a failure."""
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
        answers = [answer_of(sample, self.answer_column) for sample in samples]
        known = [i for i, answer in enumerate(answers) if isinstance(answer, str)]
        scores: list[Score] = [a if isinstance(a, Failure) else None for a in answers]
        items = [["equal", answers[i], samples[i].text, self.require_evaluated] for i in known]
        alone = [["equal", answers[i], None] for i in known]
        for i, score in zip(known, scored_alone(self._pool(), items, alone), strict=True):
            match score:
                case Failure():
                    scores[i] = score
                case Forfeit():
                    scores[i] = Forfeit(self.wrong, score.reason)
                case _:
                    scores[i] = self.value(score == 1)
        return scores

    def vote(self, sample: Sample) -> str:
        return answer_expression(sample.text)

    def votes(self, samples: Sequence[Sample]) -> list[str]:
        """Answers of one value get one text: 0.5 and \\frac{1}{2} are one answer."""
        texts = [self.vote(sample) for sample in samples]
        found: dict[str, str] = {}
        distinct = list(dict.fromkeys(texts))
        others = [text for text in distinct if written(text).number is None]
        read = self._pool().map([["equal", text, None] for text in others])
        late = {text for text, score in zip(others, read, strict=True) if isinstance(score, Failure)}
        readable = set(distinct) - late
        for text in distinct:
            if text not in readable:  # or too slow: equal to nothing else, and asked no more
                found[text] = text
                continue
            known = [one for one in dict.fromkeys(found.values()) if one in readable]
            found[text] = next((one for one, same in zip(known, self._same(text, known), strict=True) if same), text)
        return [found[text] for text in texts]

    def _same(self, text: str, others: Sequence[str]) -> list[bool]:
        """Whether each of `others` is the same answer as `text`. Numbers in digits need no worker process."""
        plain = [plain_equal(written(text), written(other)) for other in others]
        asked = [i for i, equal in enumerate(plain) if equal is None]
        answers = self._pool().map([["same", others[i], text] for i in asked])
        given = dict(zip(asked, answers, strict=True))
        return [bool(equal) if equal is not None else given[i] == 1 for i, equal in enumerate(plain)]

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> Pool:
        return pool_of("grpocli.rewards.math_worker:compute", self.workers, self.timeout)


@part("reward", "format", package="reward.format")
class Format(BaseReward):
    """1 if the whole completion matches a regular expression (`.` matches newlines too), else 0."""

    has_processes = True
    pattern: str = field(default=r"<think>.*?</think>\s*<answer>.*?</answer>")
    """Regular expression for the whole completion."""
    timeout: float = 5.0
    """Seconds for a sample, since some patterns take exponential time; a completion that takes longer scores 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        regular(self, "pattern")
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        items = [[self.pattern, sample.text] for sample in samples]
        return scored_alone(self._pool(), items, [[self.pattern, ""] for _ in samples])

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> Pool:
        return pool_of("grpocli.rewards.checks:match", 1, self.timeout)
