"""What a worker process computes for `math`. Only workers import this: math-verify takes seconds and memory."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from sympy import Set  # type: ignore[import-untyped]

FINAL = "####"  # before the answer, in GSM8K
BOX = "\\boxed{"
DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
SENTENCE = re.compile(r"^[^\\]*[A-Za-z]{2,}\s+[A-Za-z]{2,}[^\\]*$")

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every text it cannot read


def equal(gold: str, text: str) -> float:
    """1 where the answer in `text` (in its last box, else after "####", else the last expression) equals `gold`.

    Raises ValueError if no mathematics can be read from `gold`.
    """
    reference = _gold(gold)
    return float(any(verify(reference, answer, timeout_seconds=None) for answer in _answers(text) if answer))


def _answers(text: str) -> list[Any]:
    """What `text` may be read as: one answer, or with several boxes the last one and the set of them all."""
    boxes = text.count(BOX)
    if boxes == 0 and FINAL in text:
        return [_parse(text.rpartition(FINAL)[2])]
    whole = _parse(text)
    if boxes < 2:
        return [whole]
    return [_parse(BOX + text.rpartition(BOX)[2]), *([whole] if whole and isinstance(whole[0], Set) else [])]


@lru_cache(maxsize=4096)
def _gold(gold: str) -> Any:
    """A plain number, LaTeX, GSM8K's "... #### 42", or a sentence with one of them."""
    final = gold.rpartition(FINAL)[2].strip()
    marked = f"${final}$"  # read as it stands, 2x+1 is 2: only dollars say that all of it is mathematics
    for text in (final, marked) if DELIMITER.search(final) or SENTENCE.search(final) else (marked, final):
        parsed = _parse(text)
        if any(not isinstance(value, str) for value in parsed):
            return parsed
    raise ValueError(f"no mathematics can be read from the reference answer {gold!r}")


def _parse(text: str) -> Any:
    return parse(text, parsing_timeout=None)
