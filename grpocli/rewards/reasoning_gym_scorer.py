"""Questions and scores of the library reasoning-gym, which is imported when the first dataset is made."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError

COLUMN = "reasoning_gym"
MISSING_LIBRARY = "needs the library reasoning-gym: pip install reasoning-gym"


def score(place: dict[str, Any], answer: str) -> float:
    """place: where the question is from, which makes it again with all that its scorer has to know."""
    dataset = _dataset(place["name"], place["config"], place["seed"], place["size"])
    return float(dataset.score_answer(answer, dataset[place["index"]]))


@lru_cache(maxsize=32)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    return make(name, config, seed, size)


def make(name: str, config: str, seed: int, size: int) -> Any:
    """A dataset of the library's, whose entries are made when they are asked for. Raises ConfigError."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"task=reasoning_gym: {MISSING_LIBRARY} ({error})") from error
    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no such generator{nearest(name, DATASETS)}", key="task.name", value=name)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{name} refuses it: {error}", key="task.config", value=config) from error
