"""reward=[tools]: the price of a model's calls of tools."""

from __future__ import annotations

import math

from grpocli.config.parts import part, require
from grpocli.rewards.reward import BaseReward, Sample, Score


@part("reward", "tools", package="reward.tools")
class Tools(BaseReward):
    """`failure` for each call that failed, plus `call` for each call; does not apply to tasks without tools.

    A failed call cannot be read, names no tool, has wrong arguments, raises, takes too long, or is one too many.
    """

    failure: float = -0.1
    """Score of each failed call."""
    call: float = 0.0
    """Score of each call, failed or not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("failure", "call"):
            require(self, name, math.isfinite(getattr(self, name)), "must be a finite number")

    def score_sample(self, sample: Sample) -> Score:
        episode = sample.episode
        if episode is None or episode.calls is None or episode.failures is None:
            return None
        return self.failure * sum(episode.failures.values()) + self.call * sum(episode.calls.values())
