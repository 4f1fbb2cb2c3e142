"""Rewards of a completion's length, in tokens."""

from __future__ import annotations

from omegaconf import MISSING

from grpocli.config.formula import Formula
from grpocli.config.parts import interpolate, part, require
from grpocli.rewards.reward import BaseReward, Sample, Score


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

    def formula(self) -> Formula:
        return Formula(
            ("a wanted length", "R_length = max(0, 1 − |l_i − l| / w)", "l_i: o_i's tokens"),
            {"l": "target", "w": "width"},
        )

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
        if self.max_tokens is not None and self.buffer_tokens is not None:
            require(
                self,
                "buffer_tokens",
                self.buffer_tokens <= self.max_tokens,
                f"must be at most reward.overlong.max_tokens={self.max_tokens}",
            )

    def formula(self) -> Formula:
        return Formula(
            (
                "soft punishment of long completions",
                "R_overlong = min(0, max(−1, (l_max − l_buf − l_i) / l_buf))",
                "l_i: o_i's tokens;  l_buf null: max(1, ⌊l_max / 5⌋)",
            ),
            {"l_max": "max_tokens", "l_buf": "buffer_tokens"},
            ("DAPO (arXiv 2503.14476), equation 13",),
        )

    def score_sample(self, sample: Sample) -> float:
        limit = self.max_tokens or sample.max_tokens
        buffer = min(self.buffer_tokens or max(1, limit // 5), limit)
        return min(0.0, max(-1.0, (limit - buffer - sample.n_tokens) / buffer))
