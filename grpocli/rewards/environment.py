"""reward=[environment]: what the environment of a task gives."""

from __future__ import annotations

from collections.abc import Sequence

from grpocli.config.parts import part
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score


@part("reward", "environment", package="reward.environment")
class EnvironmentReward(BaseReward):
    """The sum of an environment's rewards over an episode; does not apply to tasks without an environment."""

    key: str | None = None
    """Name of one of the environment's rewards; null: all of them together. For several with different weights, give
    each a YAML with `_target_: reward/environment` and its `key`."""

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if sample.episode is None:
            return None
        given = sample.episode.rewards
        if self.key is None:
            return sum(given.values())
        if self.key not in given:
            return Failure(f"the environment gave {', '.join(given) or 'nothing'}, but no {self.key!r}")
        return given[self.key]
