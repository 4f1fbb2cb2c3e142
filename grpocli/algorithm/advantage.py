"""What the scores of groups become: advantages, weights of questions that multiply them, and which groups train.

`scores_PG` is [prompts, group], the summed rewards. NaN means that no reward applies to the completion: statistics
leave it out, and its advantage is 0. An advantage that also depends on the completions' lengths has `needs_lengths` and
is called with `lengths_PG`, the numbers of tokens in the loss. `accuracy_PG` is the reward that a question weight
names, and `rewards_PG` the one that must differ within a group that trains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpocli.config.parts import one_of, part, require, section
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run

SCORE = "score"
"""Value of `keep.reward` for the weighted sum of all rewards, unless a reward has this name."""


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


@part("algorithm/advantage", "center")
class Center:
    """r - mean, without division by the std, which would weight questions by difficulty.

    Dr. GRPO (arXiv 2503.20783), section 3.2.
    """

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return centred_PG(scores_PG)


@part("algorithm/advantage", "mad")
class Mad(Quotient):
    """(r - mean) / (MAD + eps), MAD = mean |r - mean|. DGPO's DGAE, MathForge (arXiv 2601.20614)."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        centred = centred_PG(scores_PG)
        mad_P1 = centred.abs().sum(1, keepdim=True) / count_P1(scores_PG).clamp(min=1)
        return _divide(centred, mad_P1, self.eps)


@part("algorithm/advantage", "batch_std")
class BatchStd(Quotient):
    """(r - group mean) / (std over the whole batch + eps), ddof 1. "Part I: Tricks or Traps?" (arXiv 2508.08221)."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return _divide(centred_PG(scores_PG), std_P1(scores_PG.reshape(1, -1)), self.eps)


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
        import torch

        columns = torch.arange(scores_PG.shape[1], device=scores_PG.device)
        std_PG = torch.cat([std_P1(scores_PG.index_fill(1, column, math.nan)) for column in columns], dim=1)
        return advantages_PG / (std_PG + 1e-6).where(std_PG > 0, 1.0)


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
        assert lengths_PG is not None, "over=tokens needs the lengths [P, G] of completions"
        tokens_PG = lengths_PG.to(centred.dtype).masked_fill(unscored_PG, 0.0)
        share_PG = tokens_PG / tokens_PG.sum().clamp(min=1)
        mean, least = (share_PG * centred).sum(), rounding((share_PG * centred.abs()).sum())
        mean = mean.where(mean.abs() > least, 0.0)  # 0, if lengths are equal
        centred = centred - mean
        std = (share_PG * centred.square()).sum().sqrt()
        std = std.where(std > least, 0.0)  # 0, if all completions with tokens have one score
        return _divide(centred, std, self.eps).masked_fill(unscored_PG | (std == 0), 0.0)


@part("algorithm/advantage", "max_rl")
class MaxRL:
    """(r - mean) / mean, 0 where the mean is 0, of scores of at least 0. MaxRL (arXiv 2602.02710).

    With scores of 0 and 1, the gradient approaches that of the log of the pass rate as groups grow, so that questions
    that are rarely solved weigh most.
    """

    def __call__(self, scores_PG: Tensor) -> Tensor:
        if (scores_PG < 0).any():
            problem = (
                f"divides by a group's mean score, and a completion scored {scores_PG.nan_to_num(0.0).min().item():g}"
            )
            hint = "choose rewards of 0 or more, or algorithm/advantage=std"
            raise ConfigError(problem, key="algorithm/advantage", value="max_rl", hint=hint)
        centred, mean = centred_PG(scores_PG), mean_P1(scores_PG)
        return centred / mean.where(mean > 0, 1.0)


@part("algorithm/advantage", "none")
class NoAdvantage:
    """0 for every completion: no policy gradient. For distillation, whose gradient comes from the KL part alone."""

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return scores_PG.new_zeros(scores_PG.shape)


@part("algorithm/advantage", "supervised")
class Supervised:
    """1 for every completion, and the completions are the answers of the data: supervised training (docs/sft.md).

    With algorithm/objective=policy_gradient and algorithm/aggregate=token_mean, the loss is the cross-entropy of the
    answers' tokens.
    """

    supervised = True  # the trainer takes completions from the data, and samples none

    def __call__(self, scores_PG: Tensor) -> Tensor:
        return scores_PG.new_ones(scores_PG.shape)


def _divide(centred_PG: Tensor, scale_P1: Tensor, eps: float) -> Tensor:
    """centred / (scale + eps), where 0 / 0 is 0: with eps 0 the advantages of a constant group are 0, too."""
    return (centred_PG / (scale_P1 + eps)).masked_fill(centred_PG == 0, 0.0)


@part("algorithm/question_weight", "uniform")
class Uniform:
    """Every question has weight 1."""

    reward: str | None = None
    """Unused; every question weight has this key."""

    def __call__(self, scores_PG: Tensor, accuracy_PG: Tensor) -> Tensor:
        return scores_PG.new_ones(scores_PG.shape[0])


@part("algorithm/question_weight", "difficulty")
class Difficulty:
    """N x softmax(-mean accuracy / T) over the N questions whose score is not constant; the others have weight 1.

    A group with mean accuracy 0, or with no accuracy at all, is weighted as if its accuracy were 1, because it
    contains no correct answer to learn from. DGPO's DQW, MathForge (arXiv 2601.20614).
    """

    needs_accuracy = True

    temperature: float = 2.0
    """Softmax temperature; a lower temperature gives hard questions more weight."""
    reward: str | None = None
    """Name of the reward used as accuracy. null: the reward used to evaluate the question's task (`eval.reward`, or
    else the task's first reward)."""

    def __post_init__(self) -> None:
        require(self, "temperature", 1e-6 <= self.temperature < math.inf, "must be above 0 (at least 1e-6) and finite")

    def check_run(self, run: Run) -> None:
        """Require a reward of this run."""
        if self.reward is not None:
            one_of(self, "reward", run.reward, "one of this run's rewards:")

    def __call__(self, scores_PG: Tensor, accuracy_PG: Tensor) -> Tensor:
        informative_P = ~constant_P1(scores_PG).squeeze(1)
        mean_P = mean_P1(accuracy_PG).squeeze(1)
        unsolved_P = (mean_P == 0) | (count_P1(accuracy_PG).squeeze(1) == 0)
        logits_P = (-mean_P.masked_fill(unsolved_P, 1.0) / self.temperature).masked_fill(~informative_P, float("-inf"))
        weights_P = logits_P.softmax(0) * informative_P.sum()
        return weights_P.where(informative_P, weights_P.new_ones(()))


@part("algorithm/keep", "all")
class KeepAll:
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
class DynamicSampling:
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


def count_P1(scores_PG: Tensor) -> Tensor:
    """Number of completions with a score in each group."""
    return (~scores_PG.isnan()).sum(1, keepdim=True)


def mean_P1(scores_PG: Tensor) -> Tensor:
    """Mean of each group's scores; 0 for a group without scores."""
    return scores_PG.nan_to_num(nan=0.0).sum(1, keepdim=True) / count_P1(scores_PG).clamp(min=1)


def constant_P1(scores_PG: Tensor) -> Tensor:
    """Whether a group's scores are all equal, so that none of its completions is better than another.

    Equal up to rounding, as the sums of rewards 0.1 + 0.2 and 0.3 + 0.0 are.
    """
    lowest_P1 = scores_PG.nan_to_num(nan=float("inf")).amin(1, keepdim=True)
    highest_P1 = scores_PG.nan_to_num(nan=float("-inf")).amax(1, keepdim=True)
    size_P1 = scores_PG.nan_to_num(nan=0.0).abs().amax(1, keepdim=True)
    return highest_P1 - lowest_P1 <= rounding(size_P1)


def rounding(size: Tensor) -> Tensor:
    """Largest rounding difference of equal sums of numbers of this size."""
    import torch

    return 8 * torch.finfo(size.dtype).eps * size


def centred_PG(scores_PG: Tensor) -> Tensor:
    """score - group mean; exactly 0 without a score or in a constant group.

    The mean of equal numbers may differ from them by a rounding error, which a division by 0 + eps would amplify. So
    constant groups are set to 0.
    """
    centred = scores_PG - mean_P1(scores_PG)
    return centred.masked_fill(scores_PG.isnan() | constant_P1(scores_PG), 0.0)


def std_P1(scores_PG: Tensor) -> Tensor:
    """Sample standard deviation (ddof 1) of each group; 0 for fewer than two scores."""
    squares_P1 = centred_PG(scores_PG).square().sum(1, keepdim=True)
    return (squares_P1 / (count_P1(scores_PG) - 1).clamp(min=1)).sqrt()
