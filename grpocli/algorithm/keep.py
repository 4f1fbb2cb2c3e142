"""Selection of the groups to train on. `rewards_PG` [prompts, group] is the reward that must differ within a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.algorithm.advantage import constant_P1
from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run

SCORE = "score"
"""Value of `keep.reward` for the weighted sum of all rewards, unless a reward has this name."""


@part("algorithm/keep", "all")
class All:
    """Trains on every group, after one round of sampling."""

    mask_truncated: bool = False
    """Take completions that were cut off at rollout.max_completion_tokens out of the loss."""
    max_rounds = 1
    on_exhausted = "train_partial"
    surplus = "discard"
    reward = None

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        return rewards_PG.new_ones(rewards_PG.shape[0]).bool()


@part("algorithm/keep", "dynamic")
class Dynamic:
    """Trains on groups whose accuracy is not constant; samples until `rollout.prompts_per_step` are found.

    DAPO (arXiv 2503.14476), section 3.2, equation 11: some answers are right and some are wrong. A refill is sized by
    the share of groups kept so far in the step.
    """

    max_rounds: int = 10
    """Most rounds of sampling in a step."""
    on_exhausted: str = "train_partial"
    """After the last round, `train_partial` trains on the groups found and `error` stops the run."""
    surplus: str = "discard"
    """`discard` groups beyond `rollout.prompts_per_step`, or `carry` them into the next step. Leftover groups are
    off-policy by one weight version; the sampler's log-probs are their old log-probs."""
    mask_truncated: bool = False
    """Take completions that were cut off at rollout.max_completion_tokens out of the loss."""
    reward: str | None = None
    """Name of the reward that must differ within a group. null: the accuracy reward of the group's task or, if it
    does not apply to the group, the first that does. `score`: the weighted sum of all rewards, which with an overlong
    punishment also keeps groups that differ only in length."""

    def __post_init__(self) -> None:
        require(self, "max_rounds", self.max_rounds >= 1, "must be at least 1")
        one_of(self, "on_exhausted", ("train_partial", "error"))
        one_of(self, "surplus", ("discard", "carry"))

    def check_run(self, run: Run) -> None:
        """Require a reward of this run."""
        if self.reward not in (None, SCORE):
            one_of(self, "reward", run.reward, "one of this run's rewards:")

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        return ~constant_P1(rewards_PG).squeeze(1)
