"""reward=none: no scores, for a run that learns from a teacher alone."""

from __future__ import annotations

from collections.abc import Sequence

from grpocli.config.formula import Formula
from grpocli.config.parts import part
from grpocli.rewards.reward import BaseReward, Sample, Score


@part("reward", "none", package="reward.none")
class NoReward(BaseReward):
    """Scores nothing, so a task needs no answers. For algorithm/advantage=none; such a run has no accuracy.

    It is the only reward of its run, which is built without rewards.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [None] * len(samples)

    def formula(self) -> Formula:
        return Formula(note="no score")
