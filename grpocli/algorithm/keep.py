"""Which groups are trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.algorithm.statistics import constant_P1
from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    from torch import Tensor


@part("algorithm/keep", "all")
class All:
    """Every group; one round of sampling. `mask_truncated` takes completions cut at the limit out of the loss."""

    mask_truncated: bool = False
    max_rounds = 1
    on_exhausted = "train_partial"

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return scores_PG.new_ones(scores_PG.shape[0]).bool()


@part("algorithm/keep", "dynamic")
class Dynamic:
    """Groups whose score is not constant; more are sampled until `rollout.prompts_per_step` are found.

    DAPO (arXiv 2503.14476), section 3.2, equation 11. After `max_rounds` rounds of sampling a step trains on
    what it has (`on_exhausted=train_partial`) or the run stops (`error`). Groups beyond the number wanted are
    discarded.
    """

    max_rounds: int = 10
    on_exhausted: str = "train_partial"
    surplus: str = "discard"
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        require(self, "max_rounds", self.max_rounds >= 1, "must be at least 1")
        one_of(self, "on_exhausted", ("train_partial", "error"))
        one_of(self, "surplus", ("discard",))

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return ~constant_P1(scores_PG).squeeze(1)
