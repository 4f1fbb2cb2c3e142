"""Which groups are trained on. `judged_PG` [prompts, group] is the reward that has to differ within a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.algorithm.statistics import constant_P1
from grpocli.config.formula import Formula
from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    from torch import Tensor

SCORE = "score"
"""`keep.reward` for the weighted sum of all rewards, unless a reward has that name."""

FILTERING = "overlong filtering: DAPO (arXiv 2503.14476), section 3.4"
TRUNCATED = "|o_i| = 0 for completions cut at the length limit: no loss"


@part("algorithm/keep", "all")
class All:
    """Every group; one round of sampling.

    mask_truncated: completions cut at the limit are taken out of the loss.
    """

    mask_truncated: bool = False
    max_rounds = 1
    on_exhausted = "train_partial"
    surplus = "discard"
    reward = None

    def __call__(self, judged_PG: Tensor) -> Tensor:
        return judged_PG.new_ones(judged_PG.shape[0]).bool()

    def formula(self) -> Formula:
        note = "every question is trained on"
        return Formula((TRUNCATED,), source=(FILTERING,), note=note) if self.mask_truncated else Formula(note=note)


@part("algorithm/keep", "dynamic")
class Dynamic:
    """Groups whose accuracy is not constant; more are sampled until `rollout.prompts_per_step` are found.

    DAPO (arXiv 2503.14476), section 3.2, equation 11: some answers are right and some are wrong. A refill is sized by
    the share of groups kept so far in the step.

    max_rounds: rounds of sampling in a step.
    on_exhausted: after them a step trains on what it has (`train_partial`), or the run stops (`error`).
    mask_truncated: completions cut at the limit are taken out of the loss.
    surplus: groups beyond the number wanted are discarded, or carried into the next step
    (`carry`), where the sampler's log-probs are their old log-probs: they are off-policy by one weight version.
    reward: the one that has to differ within a group. null is the accuracy: of the rewards that score the group's task
    the one that judges its evaluations, or where that does not apply to the group, the first that does. `score` is the
    weighted sum of all rewards, which with an overlong punishment also keeps groups that differ in length alone.
    """

    max_rounds: int = 10
    on_exhausted: str = "train_partial"
    surplus: str = "discard"
    mask_truncated: bool = False
    reward: str | None = None

    def __post_init__(self) -> None:
        require(self, "max_rounds", self.max_rounds >= 1, "must be at least 1")
        one_of(self, "on_exhausted", ("train_partial", "error"))
        one_of(self, "surplus", ("discard", "carry"))

    def __call__(self, judged_PG: Tensor) -> Tensor:
        return ~constant_P1(judged_PG).squeeze(1)

    def formula(self) -> Formula:
        score = "s" if self.reward == SCORE else "R_d"
        then = {"train_partial": "train on fewer", "error": "stop the run"}[self.on_exhausted]
        surplus = {"discard": "discarded", "carry": "carried into the next step, π_old = μ"}[self.surplus]
        lines = [
            f"keep a question where min_G {score} < max_G {score}",
            f"sample until P are kept; after n_max rounds {then}",
            f"questions beyond P: {surplus}",
        ]
        sources = ["DAPO (arXiv 2503.14476), section 3.2, equation 11"]
        if self.mask_truncated:
            lines.append(TRUNCATED)
            sources.append(FILTERING)
        symbols = {"n_max": "max_rounds"} | ({} if self.reward == SCORE else {"R_d": "reward"})
        return Formula(tuple(lines), symbols, tuple(sources))
