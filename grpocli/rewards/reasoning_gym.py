"""reward=[reasoning_gym]: the scorer of the generator that made the question."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpocli.config.parts import part, regular, require
from grpocli.rewards.final_answer import after_thinking
from grpocli.rewards.math_format import pool_of, scored_alone
from grpocli.rewards.reasoning_gym_scorer import COLUMN
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score


@part("reward", "reasoning_gym", package="reward.reasoning_gym")
class ReasoningGymReward(BaseReward):
    """A score between 0 and 1, from the scorer of the generator that `task=reasoning_gym` names."""

    has_processes = True
    verifiable = True
    pattern: str = r"<answer>(.*?)</answer>"
    """Regular expression whose first group is the answer; the last match counts. Without a match, the answer is all
    that follows the thinking part."""
    timeout: float = 20.0
    """Seconds for a sample; one that takes longer scores 0."""
    workers: int = 0
    """Worker processes; 0: one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        regular(self, "pattern", group="the answer")
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        known = [i for i, sample in enumerate(samples) if COLUMN in sample.columns]
        scores: list[Score] = [Failure("the example is not of task=reasoning_gym")] * len(samples)
        items = [[samples[i].columns[COLUMN], self.answer(samples[i].text)] for i in known]
        pool = pool_of("grpocli.rewards.reasoning_gym_scorer:score", self.workers, self.timeout)
        alone = [[samples[i].columns[COLUMN], ""] for i in known]
        for i, score in zip(known, scored_alone(pool, items, alone), strict=True):
            scores[i] = score
        return scores

    def vote(self, sample: Sample) -> str:
        return self.answer(sample.text)

    def answer(self, text: str) -> str:
        """What is scored."""
        text = after_thinking(text)
        found = re.findall(self.pattern, text, re.DOTALL)
        last = found[-1] if found else text
        return (last if isinstance(last, str) else last[0]).strip()

    def close(self) -> None:
        pool_of("grpocli.rewards.reasoning_gym_scorer:score", self.workers, self.timeout).close()
