"""Rewards of a completion's length in tokens, alone or beside the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import MISSING

from grpocli.config.parts import interpolate, one_of, part, require, section
from grpocli.rewards.reward import BaseReward, Sample, Score

if TYPE_CHECKING:
    from grpocli.config.schema import Run


@part("reward", "length", package="reward.length")
class Length(BaseReward):
    """1 if the completion has `target` tokens, falling linearly to 0 at `width` tokens more or fewer."""

    target: int = MISSING
    """Tokens of a completion that scores 1."""
    width: int = 64
    """Tokens from `target` to a score of 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "target", self.target >= 1, "must be at least 1")
        require(self, "width", self.width >= 1, "must be at least 1")

    def score_sample(self, sample: Sample) -> Score:
        return max(0.0, 1 - abs(sample.n_tokens - self.target) / self.width)


@part("reward", "overlong", package="reward.overlong")
class Overlong(BaseReward):
    """DAPO's soft punishment of long completions (arXiv 2503.14476), equation 13.

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens, and -1 beyond.
    """

    max_tokens: int | None = interpolate("rollout.max_completion_tokens")
    """Tokens at which the score is -1. null: the limit that the sample was cut at."""
    buffer_tokens: int | None = None
    """Tokens before max_tokens over which the score falls. null: a fifth of max_tokens, as in the paper (4096 of
    20480)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        require(self, "buffer_tokens", self.buffer_tokens is None or self.buffer_tokens >= 1, "must be at least 1")
        fits = not self.max_tokens or (self.buffer_tokens or 0) <= self.max_tokens
        require(self, "buffer_tokens", fits, f"must be at most reward.overlong.max_tokens={self.max_tokens}")

    def score_sample(self, sample: Sample) -> float:
        limit = self.max_tokens or sample.max_tokens
        buffer = min(self.buffer_tokens or max(1, limit // 5), limit)
        return min(0.0, max(-1.0, (limit - buffer - sample.n_tokens) / buffer))


@section("reward")
class GroupLength(BaseReward):
    """Base class of length rewards that depend on which answers of the group are right.

    A completion counts the tokens that the model wrote. One whose accuracy is unknown gets no score.
    """

    sees_group = True

    reward: str | None = interpolate("eval.reward")
    """Name of the reward that says which answers are right: a score of 1 or more. null: the first of the task."""

    def check_run(self, run: Run) -> None:
        """Require another reward that says which answers are right."""
        if self.reward is not None:
            one_of(self, "reward", [name for name, reward in run.reward.items() if not reward.sees_group])

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        right = [self._right(sample) for sample in samples]
        known = [(sample.n_written, one) for sample, one in zip(samples, right, strict=True) if one is not None]
        scores = iter(self.scores([length for length, _ in known], [one for _, one in known]) if known else [])
        return [None if one is None else next(scores) for one in right]

    def scores(self, lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
        """The scores of a group's completions. lengths: in tokens."""
        raise NotImplementedError

    def _right(self, sample: Sample) -> bool | None:
        """Whether the answer is right; None if that is unknown."""
        name = self.reward if self.reward in sample.scores else next(iter(sample.scores), None)
        score = None if name is None else sample.scores[name]
        return None if score is None else score >= 1


@part("reward", "length_penalty", package="reward.length_penalty")
class LengthPenalty(GroupLength):
    """A penalty for long completions, the stronger the more of the group are right.

    -p l / max l, for a completion of l tokens in a group of which the share p is right, with weight 0.25 as in
    prime-rl. So the model learns to be brief where it solves the problem, and is left alone where it does not yet.
    """

    weight: float = 0.25
    """Factor of this reward in the sum of a run's rewards."""

    def scores(self, lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
        rate, longest = sum(right) / len(right), max(1, *lengths)
        return [0.0 - rate * length / longest for length in lengths]


@part("reward", "kimi_length", package="reward.kimi_length")
class KimiLength(GroupLength):
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3): short right answers gain, long ones lose.

    λ = 0.5 - (l - min l) / (max l - min l) for a right answer, min(0, λ) for a wrong one; 0 if all are equally long.
    """

    def scores(self, lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
        shortest, longest = min(lengths), max(lengths)
        if shortest == longest:
            return [0.0] * len(lengths)
        gains = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
        return [gain if one else min(0.0, gain) for gain, one in zip(gains, right, strict=True)]
