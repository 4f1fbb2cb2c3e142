"""A GRPO-family algorithm: nine parts and how they compose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.advantage import (
    SCORE,
    DynamicSampling,
    NoAdvantage,
    centred_PG,
    constant_P1,
    rounding,
    std_P1,
)
from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.contract import try_part
from grpocli.algorithm.kl import KL
from grpocli.algorithm.metrics import loss_metrics
from grpocli.algorithm.objective import loss_and_flags
from grpocli.config.parts import nearest, one_of, part, require
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from grpocli.config.schema import Run

PARTS = ("advantage", "question_weight", "keep", "objective", "tokens", "correction", "kl", "entropy", "aggregate")


@part("algorithm", "parts")
class Algorithm:
    """Turns scores into advantages, and log-probs into a loss."""

    advantage: Any
    """Turns a group's scores into advantages."""
    question_weight: Any
    """Weighs questions against each other."""
    keep: Any
    """Selects the groups to train on."""
    objective: Any
    """The policy-gradient term of a token."""
    tokens: Any
    """Selects the tokens of the policy-gradient term."""
    correction: Any
    """Importance weights from the sampler to the trainer."""
    kl: Any
    """The penalty for leaving the reference policy."""
    entropy: Any
    """The entropy bonus."""
    aggregate: Any
    """Weighs each completion's sum over tokens."""
    combine: str = "sum"
    """How rewards become one score. `sum`: weight x reward, over the rewards that apply. `normalize_then_sum`: each
    reward is normalised in its group first; then their weighted sum is normalised over the batch (GDPO, arXiv
    2601.05242)."""
    advantage_min: float | None = None
    """Lower bound of the advantages, at most 0; null: none (NeMo RL's GRPO guide: `advantage_clip_low`)."""
    advantage_max: float | None = None
    """Upper bound of the advantages, at least 0; null: none."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts, a mean over completions; 0: none. It is added to the
    loss; 0.001 is usual (docs/models.md)."""

    def __post_init__(self) -> None:
        one_of(self, "combine", ("sum", "normalize_then_sum"))
        require(self, "router_aux_loss_coef", 0 <= self.router_aux_loss_coef < math.inf, "must be 0 or more")
        low, high = self.advantage_min, self.advantage_max
        require(self, "advantage_min", low is None or -math.inf < low <= 0, "must be 0 or less, or null for no bound")
        require(self, "advantage_max", high is None or 0 <= high < math.inf, "must be 0 or more, or null for no bound")
        for kind in PARTS:
            chosen = getattr(self, kind)
            given_a_value = isinstance(chosen, (str, int, float, list, dict)) or chosen is None
            require(self, kind, not given_a_value, f"is not a part; choose one with algorithm/{kind}={chosen}")

    def check_run(self, run: Run) -> None:
        """Require rewards for an advantage."""
        has_advantage = not isinstance(self.advantage, NoAdvantage)
        if not run.reward and has_advantage and not self.supervised:
            problem = "without rewards there is no advantage: add algorithm/advantage=none, or choose a reward"
            raise ConfigError(problem, key="reward", value="none")
        informative = isinstance(self.keep, DynamicSampling) or getattr(self.aggregate, "informative_only", False)
        if informative and not has_advantage:
            problem = "no group has one: leave algorithm/keep=all and algorithm.aggregate.informative_only=false"
            raise ConfigError(problem, key="algorithm/advantage", value="none")

    def check_ready(self) -> None:
        """Raise ConfigError if the policy would learn nothing, or if a part of a user breaks its contract."""
        taught = self.needs_reference and (not isinstance(self.kl, KL) or self.kl.has_teacher)
        if isinstance(self.advantage, NoAdvantage) and not (taught or self.needs_entropy_gradient):
            problem = "nothing trains: choose algorithm/kl=reverse with algorithm.kl.model=TEACHER and a beta above 0"
            raise ConfigError(problem, key="algorithm/advantage", value="none")
        for kind in PARTS:
            if not type(getattr(self, kind)).__module__.startswith("grpocli."):
                try_part(kind, getattr(self, kind))

    @property
    def supervised(self) -> bool:
        """Whether the completions to train on are the answers of the data."""
        return bool(getattr(self.advantage, "supervised", False))

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model must score the rollouts."""
        return bool(self.kl.beta > 0)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether `loss` needs entropies with a gradient."""
        return bool(self.entropy.coefficient > 0)

    @property
    def needs_lengths(self) -> bool:
        """Whether `advantages` needs the lengths of completions."""
        return bool(getattr(self.advantage, "needs_lengths", False))

    # Which rows an update may leave out: `Updater` leaves out a row with advantage 0 if `skips_zero_advantages`, and a
    # row without tokens in the loss unless `depends_on_split`. The first two properties extend what the objective and
    # the aggregate promise under the same names; a user's part may lack them.

    @property
    def zero_at_zero_advantage(self) -> bool:
        """Whether a row whose advantage is 0 has no gradient, with KL, entropy bonus and routers included."""
        others = self.needs_reference or self.needs_entropy_gradient or self.router_aux_loss_coef > 0
        return bool(getattr(self.objective, "zero_at_zero_advantage", False) and not others)

    @property
    def depends_on_split(self) -> bool:
        """Whether the rows of a micro-batch affect each other's weights, so that none may be left out."""
        return bool(getattr(self.aggregate, "depends_on_split", True))

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether a row whose advantage is 0 cannot change an update."""
        return self.zero_at_zero_advantage and not (self.depends_on_split or self.tokens.needs_entropy)

    @property
    def has_correction(self) -> bool:
        """Whether tokens get importance weights from the sampler to the policy at the start of the step."""
        return bool(getattr(self.correction, "corrects", True))

    @property
    def takes_sampler_as_old(self) -> bool:
        """Whether every completion's old policy is the one that sampled it, so that none is scored beforehand."""
        return bool(getattr(self.correction, "takes_sampler_as_old", False))

    def old_is_sampler(self, stale: bool) -> bool:
        """Whether the old policy of a completion is the policy that sampled it, by the sampler's own log-probs.

        stale: whether older weights than those at the start of the step sampled it. Without a correction it is then
        off-policy. With one, the correction is the ratio of the old policy, at the start of the step, to the sampler.
        """
        return self.takes_sampler_as_old or (stale and not self.has_correction and not self.supervised)

    def scores(self, rewards: dict[str, Tensor], weights: dict[str, float] | None = None) -> Tensor:
        """Sum of weight x reward [P, G]; NaN where no reward applies. Raises the errors of `advantages`."""
        import torch

        rewards, weights = _checked(rewards, weights), weights or {}
        weighted_RPG = torch.stack([values_PG * weights.get(name, 1.0) for name, values_PG in rewards.items()])
        total_PG = weighted_RPG.nansum(0)
        cancelled_PG = total_PG.abs() <= rounding(weighted_RPG.abs().nansum(0))  # 0.1 + 0.2 - 0.3 is 0
        return total_PG.masked_fill(cancelled_PG, 0.0).masked_fill(weighted_RPG.isnan().all(0), float("nan"))

    def advantages(
        self,
        rewards: dict[str, Tensor],
        weights: dict[str, float] | None = None,
        accuracy: Sequence[str] | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Advantages [P, G] of rewards {name: [P, G]}, NaN where a reward does not apply.

        A completion to which no reward applies has the advantage 0.
        weights: by reward name; the default is 1. accuracy: for each of the P groups, the name of the reward that
        measures accuracy (None: the first reward). lengths [P, G]: the number of each completion's tokens in the loss.
        Raises ValueError if rewards are not [P, G] of finite numbers and NaN, if a weight is not finite or its reward
        is missing, or if `lengths` has another shape, or is missing and the advantage part needs it.
        Raises ConfigError if `algorithm.question_weight.reward` is not the name of a reward.
        """
        rewards = _checked(rewards, weights)
        scores_PG = self.scores(rewards, weights)
        if lengths is not None and lengths.shape != scores_PG.shape:
            raise ValueError(f"lengths has the shape {list(lengths.shape)}, the rewards {list(scores_PG.shape)}")
        if self.combine == "sum":
            advantages_PG = self._advantage(scores_PG, lengths)
        else:
            advantages_PG = self._normalize_then_sum(rewards, weights or {}, scores_PG, lengths)
        weight_P = self.question_weight(scores_PG, self._accuracy(self.question_weight, rewards, accuracy))
        result: Tensor = advantages_PG * weight_P.unsqueeze(1)
        if self.advantage_min is None and self.advantage_max is None:
            return result
        return result.clamp(self.advantage_min, self.advantage_max)

    def _advantage(self, scores_PG: Tensor, lengths_PG: Tensor | None) -> Tensor:
        if self.needs_lengths and lengths_PG is None:
            raise ValueError("the part algorithm/advantage of this algorithm needs advantages(lengths=...)")
        advantages_PG: Tensor = self.advantage(scores_PG, *([lengths_PG] if self.needs_lengths else []))
        return advantages_PG

    def _normalize_then_sum(
        self, rewards: dict[str, Tensor], weights: dict[str, float], scores_PG: Tensor, lengths_PG: Tensor | None
    ) -> Tensor:
        total_PG = scores_PG * 0
        for name, values_PG in rewards.items():
            normal_PG = self._advantage(values_PG.to(total_PG.dtype), lengths_PG)
            total_PG = total_PG + normal_PG * weights.get(name, 1.0)
        flat = total_PG.reshape(1, -1)
        normal_PG = (centred_PG(flat) / (std_P1(flat) + 1e-4)).reshape(total_PG.shape)
        # the mean is 0 up to rounding, which would give constant groups an advantage of about 1e-17
        return normal_PG.masked_fill(scores_PG.isnan() | constant_P1(total_PG), 0.0)

    def kept(
        self,
        rewards: dict[str, Tensor],
        weights: dict[str, float] | None = None,
        accuracy: Sequence[str] | None = None,
    ) -> Tensor:
        """The groups [P] (bool) to train on, by the keep part. Arguments and errors are those of `advantages`."""
        rewards = _checked(rewards, weights)
        if self.keep.reward == SCORE and SCORE not in rewards:
            chosen_PG = self.scores(rewards, weights)
        else:
            chosen_PG = self._accuracy(self.keep, rewards, accuracy)
            if self.keep.reward is None:  # where accuracy does not apply to a group, the first reward that does
                for values_PG in rewards.values():
                    applies_P1 = ~chosen_PG.isnan().all(1, keepdim=True)
                    chosen_PG = chosen_PG.where(applies_P1, values_PG.to(chosen_PG.dtype))
        kept_P: Tensor = self.keep(chosen_PG)
        return kept_P

    def _accuracy(self, reader: Any, rewards: dict[str, Tensor], names: Sequence[str] | None) -> Tensor:
        """The reward [P, G] that a part reads: the one it names, else each group's accuracy, else the first.

        Raises ConfigError if the part names no reward, and KeyError or ValueError if `names` does not name P of them.
        """
        import torch

        if reader.reward is not None:
            one_of(reader, "reward", rewards, "one of this run's rewards:")
            return rewards[reader.reward]
        first_PG = next(iter(rewards.values()))
        if names is None or not len(first_PG):
            return first_PG
        return torch.stack([rewards[name][p] for p, name in zip(range(len(first_PG)), names, strict=True)])

    def totals(
        self, advantages: Tensor, mask: Tensor, group_ids: Tensor | None = None, micro_batches: int = 1
    ) -> Totals:
        """The counts of a whole optimizer window [B] or [B, T], [B, T], [B], for `loss` of each part of the window.

        group_ids: None for one group per row. Advantages [B, T] of a row are 0 if all those in the loss are.
        """
        group_ids = _own_groups(advantages) if group_ids is None else group_ids
        if advantages.ndim == 2:
            advantages = ((advantages != 0) & mask.bool()).any(1)
        return Totals.of(advantages, mask.sum(1), group_ids, micro_batches)

    def loss(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        group_ids: Tensor | None = None,
        ref_logp: Tensor | None = None,
        rollout_logp: Tensor | None = None,
        entropy: Tensor | None = None,
        selected: Tensor | None = None,
        totals: Totals | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of some rows of an optimizer window; the losses of its parts add up to the window's loss.

        It lacks the term of `router_aux_loss_coef`, which needs the model's routers (`training/router_balance.py`).
        logp [B, T]: log-probs of the tokens under the policy, in nats, with gradient. old_logp [B, T]: under the
        policy at the start of the step. For completions of older weights, without a correction: under the policy that
        sampled them. rollout_logp [B, T]: under the policy that sampled, computed by the sampler; with
        `algorithm/correction=sampler` it is the old policy, too. ref_logp [B, T]: under the reference.
        advantages [B], or [B, T] for an advantage of each token. mask [B, T]: 1 for tokens in the loss. group_ids [B]:
        integers (None: one group per row).
        entropy [B, T]: of the policy at each token, in nats, with gradient if the entropy part is a bonus.
        selected [B, T]: tokens of the policy-gradient term (None: the tokens part selects them from these rows).
        totals: counts of the window (None: these rows are the whole window).

        Returns a scalar, and metrics as scalars that add up over the window's parts as well, except
        `clip_ratio/low_min` and `clip_ratio/high_max`, a minimum and a maximum. Metrics of the gap between sampler and
        trainer need `rollout_logp`.
        Raises ValueError for a wrong shape, and if `ref_logp`, `entropy`, `selected` or `group_ids` is missing and a
        part needs it.
        """
        _check_shapes(logp, old_logp=old_logp, advantages=advantages, mask=mask, group_ids=group_ids, ref_logp=ref_logp)
        _check_shapes(logp, rollout_logp=rollout_logp, entropy=entropy, selected=selected)
        whole = totals is None
        if group_ids is None and not whole and getattr(self.aggregate, "needs_groups", True):  # a user's may lack it
            raise ValueError("loss(totals=...) needs loss(group_ids=...), as in totals(group_ids=...)")
        if group_ids is None:
            group_ids = _own_groups(advantages) if whole else advantages.new_zeros(len(advantages)).long()
        totals = totals or self.totals(advantages, mask, group_ids)
        logp, old_logp, advantages = _inside(mask, logp, old_logp, advantages)
        sampler_logp = old_logp if rollout_logp is None else _inside(mask, rollout_logp)[0]
        if self.takes_sampler_as_old:
            old_logp = sampler_logp.detach()

        loss_BT, clipped = loss_and_flags(self.objective(logp, old_logp, advantages, mask))
        loss_BT = loss_BT * self.correction(old_logp, sampler_logp, mask)
        if self.tokens.needs_entropy:
            if selected is None and whole:  # of a part, only the caller knows the threshold of the window
                selected = self.tokens(_given(entropy, "entropy", "tokens").detach(), mask)
            loss_BT = loss_BT * _given(selected, "selected", "tokens")
        kl_BT = None
        if self.needs_reference:
            kl_BT = self.kl(logp, old_logp, *_inside(mask, _given(ref_logp, "ref_logp", "kl")))
            loss_BT = loss_BT + self.kl.beta * kl_BT
        if self.needs_entropy_gradient:
            loss_BT = loss_BT - self.entropy(*_inside(mask, _given(entropy, "entropy", "entropy")))
        weight_B = self.aggregate(mask, group_ids, totals).to(loss_BT.dtype)
        loss = ((loss_BT * mask).sum(1) * weight_B).sum()
        rollout_logp = None if rollout_logp is None else sampler_logp
        trainer_logp = logp.detach() if self.takes_sampler_as_old else old_logp
        return loss, loss_metrics(logp, trainer_logp, rollout_logp, mask, totals, clipped, kl_BT)

    def clipped(self, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Whether the objective clips each token [B, T] (bool), on either side. Arguments are those of `loss`."""
        _, sides = loss_and_flags(self.objective(*_inside(mask, logp.detach(), old_logp, advantages), mask))
        found_BT = mask.new_zeros(mask.shape).bool()
        for flags in sides.values():  # [B] for a sequence ratio
            found_BT = found_BT | (flags if flags.shape == mask.shape else flags.unsqueeze(1))
        return found_BT & mask.bool()


def _checked(rewards: Mapping[str, Tensor], weights: Mapping[str, float] | None) -> dict[str, Tensor]:
    """The rewards as floating-point tensors [P, G]. Raises the ValueErrors of `Algorithm.advantages`, with the name."""
    import torch

    if not rewards:
        raise ValueError("an algorithm needs at least one reward: {name: tensor [P, G]}")
    shape = next(iter(rewards.values())).shape
    for name, values in rewards.items():
        if values.ndim != 2 or values.shape != shape:
            raise ValueError(f"reward {name!r} has the shape {list(values.shape)}; give [P, G], the same for all")
        if values.isinf().any():
            where = values.isinf().nonzero()[0].tolist()
            raise ValueError(f"reward {name!r} is infinite at {where}; give NaN where it does not apply")
    for name, weight in (weights or {}).items():
        if name not in rewards:
            raise ValueError(f"weights[{name!r}]: there is no such reward{nearest(name, rewards)}")
        if not math.isfinite(weight):
            raise ValueError(f"weights[{name!r}] is {weight}; give a finite number")
    return {n: v if v.is_floating_point() else v.to(torch.get_default_dtype()) for n, v in rewards.items()}


def _check_shapes(logp: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError with the name of an argument of `loss` whose shape would be broadcast silently.

    `group_ids` is [B], `advantages` is [B] or [B, T], and the others are [B, T].
    """
    if logp.ndim != 2:
        raise ValueError(f"loss(logp=...) has the shape {list(logp.shape)}; give [B, T]")
    for name, value in others.items():
        if value is None:
            continue
        of_rows = name == "group_ids" or (name == "advantages" and value.ndim == 1)
        shape = logp.shape[:1] if of_rows else logp.shape
        if value.shape != shape:
            raise ValueError(f"loss({name}=...) has the shape {list(value.shape)}; give {list(shape)}, as logp has")


def _inside(mask: Tensor, *given: Tensor) -> list[Tensor]:
    """Tensors [B, T] with 0 outside of the loss, where log-probs may be anything; those [B] as they are."""
    inside_BT = mask.bool()
    return [one.where(inside_BT, 0.0) if one.ndim == 2 else one for one in given]


def _own_groups(advantages: Tensor) -> Tensor:
    """Group ids [B] of rows that are a group each."""
    import torch

    return torch.arange(len(advantages), device=advantages.device)


def _given(value: Tensor | None, name: str, kind: str) -> Tensor:
    if value is None:
        raise ValueError(f"the part algorithm/{kind} of this algorithm needs loss({name}=...)")
    return value
