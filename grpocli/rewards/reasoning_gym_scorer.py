"""What a worker process computes for `reasoning_gym`. Only workers import this: the library takes seconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from grpocli.tasks.reasoning_gym import make


def score(place: dict[str, Any], answer: str) -> float:
    """place: where the question is from, which makes it again with all that its scorer has to know."""
    dataset = _dataset(place["name"], place["config"], place["seed"], place["size"])
    return float(dataset.score_answer(answer, dataset[place["index"]]))


@lru_cache(maxsize=32)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    return make(name, config, seed, size)
