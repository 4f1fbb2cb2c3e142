"""Advantages from the scores of groups. `scores_PG` is [prompts, group]; NaN means no score, advantage 0.

An advantage that also depends on the completions' lengths has `needs_lengths` and is called with `lengths_PG`, the
numbers of tokens in the loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpocli.algorithm.statistics import centred_PG, count_P1, mean_P1, rounding, std_P1
from grpocli.config.formula import Formula
from grpocli.config.parts import one_of, part, require, section
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

ZERO = "A_i = 0 for a completion without a score, and if all scores of the group are equal."

OTHERS_EPS = 1e-6
"""Added to the std of the other completions."""


@section("algorithm.advantage")
class Quotient:
    """Base of the advantages that are divided by the spread of the scores."""

    eps: float = 1e-4
    """Added to the denominator to keep advantages bounded when the spread of the scores is near 0."""

    def __post_init__(self) -> None:
        require(self, "eps", 0 <= self.eps < math.inf, "must be a finite number of 0 or more")


@part("algorithm/advantage", "std")
class Std(Quotient):
    """(r - mean) / (std + eps), std with ddof 1. GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return _divide(centred_PG(scores_PG), std_P1(scores_PG), self.eps)

    def formula(self) -> Formula:
        return Formula(
            ("A_i = (s_i − mean_G s) / (std_G s + ε)", "std_G s = √( Σ_G (s − mean_G s)² / (n − 1) ),  n scores"),
            {"ε": "eps"},
            ("GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2",),
            ZERO,
        )


@part("algorithm/advantage", "center")
class Center:
    """r - mean, without division by the std, which would weight questions by difficulty.

    Dr. GRPO (arXiv 2503.20783), section 3.2.
    """

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return centred_PG(scores_PG)

    def formula(self) -> Formula:
        return Formula(("A_i = s_i − mean_G s",), source=("Dr. GRPO (arXiv 2503.20783), section 3.2",), note=ZERO)


@part("algorithm/advantage", "mad")
class Mad(Quotient):
    """(r - mean) / (MAD + eps), MAD = mean |r - mean|. DGPO's DGAE, MathForge (arXiv 2601.20614)."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        centred = centred_PG(scores_PG)
        mad_P1 = centred.abs().sum(1, keepdim=True) / count_P1(scores_PG).clamp(min=1)
        return _divide(centred, mad_P1, self.eps)

    def formula(self) -> Formula:
        return Formula(
            ("A_i = (s_i − mean_G s) / (MAD_G s + ε)", "MAD_G s = mean_G |s − mean_G s|"),
            {"ε": "eps"},
            ("DGPO's DGAE, MathForge (arXiv 2601.20614)",),
            ZERO,
        )


@part("algorithm/advantage", "batch_std")
class BatchStd(Quotient):
    """(r - group mean) / (std over the whole batch + eps), ddof 1. "Part I: Tricks or Traps?" (arXiv 2508.08221)."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return _divide(centred_PG(scores_PG), std_P1(scores_PG.reshape(1, -1)), self.eps)

    def formula(self) -> Formula:
        return Formula(
            ("A_i = (s_i − mean_G s) / (std s + ε)", "std s = √( Σ (s − mean s)² / (n − 1) ),  the step's n scores"),
            {"ε": "eps"},
            ('"Tricks or Traps?" (arXiv 2508.08221)',),
            ZERO,
        )


@part("algorithm/advantage", "leave_one_out")
class LeaveOneOut:
    """r - mean of the other completions. RLOO (arXiv 2402.14740), equation 9."""

    scale: str = "none"
    """`none`, or `others`: divided by the std (ddof 1) of the other completions' scores + 1e-6 where that std is not 0,
    NeMo RL's default. It has a quirk: the only right answer of a group is not scaled, since the others are all equal,
    and the wrong ones are; of scores 1, 0, 0, 0 the advantages are 1 and -0.58."""

    def __post_init__(self) -> None:
        one_of(self, "scale", ("none", "others"))

    def __call__(self, scores_PG: Tensor) -> Tensor:
        n_P1 = count_P1(scores_PG)
        advantages_PG = centred_PG(scores_PG) * n_P1 / (n_P1 - 1).clamp(min=1)
        if self.scale == "none":
            return advantages_PG
        std_PG = _std_of_others(scores_PG)
        return advantages_PG / (std_PG + OTHERS_EPS).where(std_PG > 0, 1.0)

    def formula(self) -> Formula:
        lines = ["A_i = s_i − Σ_G,j≠i s_j / (n − 1),  n scores", "    = (s_i − mean_G s) n / (n − 1)"]
        sources = ["RLOO (arXiv 2402.14740), equation 9"]
        if self.scale == "others":
            lines.append("A_i ← A_i / (std_G,j≠i s + 10⁻⁶) where that std is not 0")
            sources.append("scaled: NeMo RL (normalize_rewards, use_leave_one_out_baseline)")
        return Formula(tuple(lines), source=tuple(sources), note=ZERO)


@part("algorithm/advantage", "reinforce_pp")
class ReinforcePlusPlus:
    """(r - group mean) / (std of that over the whole batch + eps). REINFORCE++-baseline (arXiv 2501.03262).

    `batch_std` divides by the std of the scores themselves, which also has the spread between questions.
    """

    over: str = "samples"
    """What mean and std run over. `samples`: completions, std with ddof 1, as in ms-swift. `tokens`: each completion
    counts as often as it has tokens, std with ddof 0, and the mean over tokens is subtracted again, as in the authors'
    OpenRLHF, NeMo RL and verl (whose ddof is 1); the completions of a constant group then have an advantage, too."""
    eps: float = 1e-8
    """Added to the std."""

    def __post_init__(self) -> None:
        one_of(self, "over", ("samples", "tokens"))
        require(self, "eps", 0 <= self.eps < math.inf, "must be a finite number of 0 or more")

    @property
    def needs_lengths(self) -> bool:
        """Whether the advantage depends on the completions' lengths."""
        return self.over == "tokens"

    def __call__(self, scores_PG: Tensor, lengths_PG: Tensor | None = None) -> Tensor:
        unscored_PG = scores_PG.isnan()
        centred = centred_PG(scores_PG)
        if self.over == "samples":
            return _divide(centred, std_P1(centred.masked_fill(unscored_PG, math.nan).reshape(1, -1)), self.eps)
        if lengths_PG is None:
            raise ValueError(
                "algorithm/advantage=reinforce_pp with over=tokens needs the lengths [P, G] of completions"
            )
        tokens_PG = lengths_PG.to(centred.dtype).masked_fill(unscored_PG, 0.0)
        share_PG = tokens_PG / tokens_PG.sum().clamp(min=1)
        mean = (share_PG * centred).sum()
        mean = mean.where(mean.abs() > rounding((share_PG * centred.abs()).sum()), 0.0)  # 0, if lengths are equal
        centred = centred - mean
        std = (share_PG * centred.square()).sum().sqrt()
        return _divide(centred, std, self.eps).masked_fill(unscored_PG | (std == 0), 0.0)

    def formula(self) -> Formula:
        sources = ("REINFORCE++-baseline (arXiv 2501.03262)",)
        if self.over == "samples":
            scaled = ("A_i = c_i / (std c + ε)", "std c = √( Σ c² / (n − 1) ),  the step's n scores")
            return Formula(("c_i = s_i − mean_G s", *scaled), {"ε": "eps"}, sources, ZERO)
        lines = (
            "c_i = s_i − mean_G s",
            "A_i = (c_i − b) / (√v + ε)",
            "b = Σ_j |o_j| c_j / Σ_j |o_j|,  j: the step's completions",
            "v = Σ_j |o_j| (c_j − b)² / Σ_j |o_j|",
        )
        note = "A_i = 0 for a completion without a score. Where all scores of a group are equal, c_i = 0, but not A_i."
        return Formula(lines, {"ε": "eps"}, sources, note)


@part("algorithm/advantage", "max_rl")
class MaxRL:
    """(r - mean) / mean, 0 where the mean is 0, of scores of at least 0. MaxRL (arXiv 2602.02710).

    With scores of 0 and 1, the gradient approaches that of the log of the pass rate as groups grow, so that questions
    that are rarely solved weigh most.
    """

    def __call__(self, scores_PG: Tensor) -> Tensor:
        if (scores_PG < 0).any():
            raise ConfigError(
                f"divides by the mean score of a group, and a completion scored {scores_PG[scores_PG < 0][0].item():g}",
                key="algorithm/advantage",
                value="max_rl",
                hint="choose rewards of 0 or more, or algorithm/advantage=std",
            )
        centred, mean = centred_PG(scores_PG), mean_P1(scores_PG)
        return centred / mean.where(mean > 0, 1.0)

    def formula(self) -> Formula:
        return Formula(("A_i = (s_i − mean_G s) / mean_G s",), source=("MaxRL (arXiv 2602.02710)",), note=ZERO)


@part("algorithm/advantage", "none")
class NoAdvantage:
    """0 for every completion: no policy gradient. For distillation, whose gradient comes from the KL part alone."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return scores_PG.new_zeros(scores_PG.shape)

    def formula(self) -> Formula:
        source = ("distillation without a reward: GKD (arXiv 2306.13649)",)
        return Formula(("A_i = 0",), source=source, note="Scores are reported and have no gradient.")


@part("algorithm/advantage", "supervised")
class Supervised:
    """1 for every completion, and the completions are the answers of the data: supervised training (docs/sft.md).

    With algorithm/objective=policy_gradient and algorithm/aggregate=token_mean, the loss is the cross-entropy of the
    answers' tokens.
    """

    supervised = True  # the trainer takes completions from the data, and samples none

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return scores_PG.new_ones(scores_PG.shape)

    def formula(self) -> Formula:
        note = "o_i is the answer of the data, not a sample of π_old."
        return Formula(("A_i = 1",), source=("maximum likelihood",), note=note)


def _std_of_others(scores_PG: Tensor) -> Tensor:
    """The sample standard deviation of each completion's group without the completion; 0 for fewer than two scores."""
    import torch

    columns = torch.arange(scores_PG.shape[1], device=scores_PG.device)
    return torch.cat([std_P1(scores_PG.index_fill(1, column, math.nan)) for column in columns], dim=1)


def _divide(centred_PG: Tensor, scale_P1: Tensor, eps: float) -> Tensor:
    """centred / (scale + eps), where 0 / 0 is 0: with eps 0 the advantages of a constant group are 0, too."""
    return (centred_PG / (scale_P1 + eps)).masked_fill(centred_PG == 0, 0.0)
