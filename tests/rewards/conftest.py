"""Samples, completions and scripted rewards for reward tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpocli.rewards.reward import BaseReward, Sample, Score
from grpocli.types import Completion, Prompt, Rollout


@pytest.fixture
def sample():
    """A factory of samples: make(text, tokens=1, max_tokens=100, **columns)."""

    def make(text: str, *, tokens: int = 1, max_tokens: int = 100, **columns: Any) -> Sample:
        (rollout,) = rollouts(text, tokens=tokens, **columns)
        return Sample.of(rollout, max_tokens)

    return make


def rollouts(*texts: str, prompt: Any = "Why?", uid: str = "0", tokens: int = 1, **columns: Any) -> list[Rollout]:
    """Completions of one prompt, with these texts and columns."""
    made = Prompt(uid, [1], prompt, columns)
    return [Rollout(made, Completion([7] * tokens, [0.0] * tokens, "stop", 0), text) for text in texts]


class Scripted(BaseReward):
    """Scores each sample by a function."""

    def __init__(self, script: Callable[[Sample], Score]) -> None:
        object.__setattr__(self, "script", script)

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self.script(sample) for sample in samples]  # type: ignore[attr-defined]
