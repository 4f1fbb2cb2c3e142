"""What scores completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grpocli.data import Text


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as a reward sees it.

    prompt and completion are both strings (plain data), or both lists of messages (conversational data).
    text: the completion's text in either case. columns: the example's other columns.
    n_tokens: the completion's length. max_tokens: the limit it was sampled under. truncated: it was cut there.
    """

    prompt: Text
    completion: Text
    text: str
    columns: dict[str, Any]
    n_tokens: int
    max_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that could not be scored: never a 0. `reason` is a phrase for the user."""

    reason: str


Score = float | None | Failure  # None: does not apply to this sample


class Reward(Protocol):
    """A choice of the config group `reward`, of type `reward.NAME`."""

    weight: float

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order. An exception counts as a Failure of every sample."""
        ...
