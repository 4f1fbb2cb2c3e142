"""What the worker processes compute. math-verify is only ever imported there."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any


DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
SENTENCE = re.compile(r"^[^\\]*[A-Za-z]{2,}\s+[A-Za-z]{2,}[^\\]*$")


def match(pattern: str, text: str) -> float:
    """1 where the whole text, without surrounding space, matches."""
    return float(re.fullmatch(pattern, text.strip(), flags=re.DOTALL) is not None)


def equal(gold: str, text: str) -> float:
    """1 where the last answer in `text` (boxed first) equals `gold` mathematically.

    Raises ValueError if no mathematics can be read from `gold`.
    """
    from math_verify import verify

    reference = _gold(gold)
    answer = _parse(text)
    return float(bool(answer) and verify(reference, answer, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(gold: str) -> Any:
    """A plain number, LaTeX, GSM8K's "... #### 42", or a sentence with one of them."""
    final = gold.rpartition("####")[2].strip()
    marked = f"${final}$"  # read as it stands, 2x+1 is 2: only dollars say that all of it is mathematics
    for text in (final, marked) if DELIMITER.search(final) or SENTENCE.search(final) else (marked, final):
        parsed = _parse(text)
        if any(not isinstance(value, str) for value in parsed):
            return parsed
    raise ValueError(f"no mathematics can be read from the reference answer {gold!r}")


def _parse(text: str) -> Any:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every text it cannot read
    return parse(text, parsing_timeout=None)
