"""Which examples are kept for evaluation where the data has none of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from grpocli.tasks.loading import Row


def hold_out(rows: Iterable[Row], columns: Sequence[str], most: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on, and row numbers to evaluate on: at least one question each.

    The question is what is in `columns`: equal questions go to the same side. Those whose hash is smallest are
    held out, so that the choice needs no seed and most of it stays when examples are added. Where there is one
    question only, its rows are told apart by their place.
    most: how many questions are held out, but no more than a fifth. Needs two rows.
    """
    hashes = [_hash([row[c] for c in columns]) for row in rows]
    if len(set(hashes)) == 1:
        hashes = [_hash(place) for place in range(len(hashes))]
    questions = sorted(set(hashes))
    held_out = set(questions[: min(most, max(1, len(questions) // 5))])
    train = [i for i, h in enumerate(hashes) if h not in held_out]
    return train, [i for i, h in enumerate(hashes) if h in held_out]


def _hash(values: Any) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).digest()
