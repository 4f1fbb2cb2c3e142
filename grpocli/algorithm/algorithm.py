"""A GRPO-family algorithm: nine parts and how they compose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.advantage import NoAdvantage
from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.contract import check_accuracy, check_rows, checked_rewards, try_part
from grpocli.algorithm.keep import SCORE, Dynamic
from grpocli.algorithm.kl import KL
from grpocli.algorithm.objective import loss_and_flags
from grpocli.algorithm.statistics import centred_PG, constant_P1, rounding, std_P1
from grpocli.config.parts import one_of, part, require
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        """Refuse what needs samples of a policy in supervised training, and rewards that no advantage reads."""
        if self.supervised:
            problem = "supervised training samples no completions"
            if isinstance(self.keep, Dynamic):
                raise ConfigError(f"{problem}: choose algorithm/keep=all", key="algorithm/keep", value="dynamic")
            if self.has_correction or self.takes_sampler_as_old:
                raise ConfigError(f"{problem}: choose algorithm/correction=none", key="algorithm/correction")
        has_advantage = not isinstance(self.advantage, NoAdvantage)
        if not run.reward and has_advantage and not self.supervised:
            problem = "without rewards there is no advantage: add algorithm/advantage=none, or choose a reward"
            raise ConfigError(problem, key="reward", value="none")
        informative = isinstance(self.keep, Dynamic) or getattr(self.aggregate, "informative_only", False)
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

    # Which rows an update may leave out: `Updater` leaves out a row with advantage 0 if `skips_zero_advantages`, and a
    # row without tokens in the loss unless `depends_on_split`. The first two properties extend what the objective and
    # the aggregate promise under the same names; the third follows from both.

    @property
    def zero_at_zero_advantage(self) -> bool:
        """Whether a row whose advantage is 0 has no gradient, with KL, entropy bonus and routers included."""
        objective = getattr(self.objective, "zero_at_zero_advantage", False)  # a user's part may lack it
        others = self.needs_reference or self.needs_entropy_gradient or self.router_aux_loss_coef > 0
        return bool(objective and not others)

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether a row whose advantage is 0 cannot change an update."""
        return self.zero_at_zero_advantage and not (self.depends_on_split or self.tokens.needs_entropy)

    @property
    def depends_on_split(self) -> bool:
        """Whether the rows of a micro-batch affect each other's weights, so that no row may be left out, even one
        without tokens in the loss."""
        return bool(getattr(self.aggregate, "depends_on_split", True))

    @property
    def has_correction(self) -> bool:
        """Whether tokens get importance weights from the sampler to the policy at the start of the step."""
        return bool(getattr(self.correction, "corrects", True))  # a user's part may lack it

    @property
    def takes_sampler_as_old(self) -> bool:
        """Whether the old policy of every completion is the one that sampled it, so that no update needs its
        log-probs computed beforehand."""
        return bool(getattr(self.correction, "takes_sampler_as_old", False))

    def old_is_sampler(self, stale: bool) -> bool:
        """Whether the old policy of a completion is the policy that sampled it, by the sampler's own log-probs.

        stale: whether older weights than those at the start of the step sampled it. Without a correction it is then
        off-policy. With one, the correction is the ratio of the old policy, at the start of the step, to the sampler.
        """
        return self.takes_sampler_as_old or (stale and not self.has_correction and not self.supervised)

    @property
    def needs_lengths(self) -> bool:
        """Whether `advantages` needs the lengths of completions."""
        return bool(getattr(self.advantage, "needs_lengths", False))

    def scores(self, rewards: dict[str, Tensor], weights: dict[str, float] | None = None) -> Tensor:
        """Sum of weight x reward [P, G]; NaN where no reward applies. Raises the errors of `advantages`."""
        import torch

        weighted_RPG = torch.stack([v * _weight(weights, n) for n, v in checked_rewards(rewards, weights).items()])
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
        is missing, if `accuracy` does not name a reward for each group, or if `lengths` has another shape, or is
        missing and the advantage part needs it.
        Raises ConfigError if `algorithm.question_weight.reward` is not the name of a reward.
        """
        rewards = checked_rewards(rewards, weights)
        scores_PG = self.scores(rewards, weights)
        if lengths is not None and lengths.shape != scores_PG.shape:
            raise ValueError(f"lengths has the shape {list(lengths.shape)}, the rewards {list(scores_PG.shape)}")
        if self.combine == "sum":
            advantages_PG = self._advantage(scores_PG, lengths)
        else:
            advantages_PG = self._normalize_then_sum(rewards, weights, scores_PG, lengths)
        name = self.question_weight.reward
        accuracy_PG = rewards[_known("question_weight", name, rewards)] if name else _accuracy(rewards, accuracy)
        weight_P = self.question_weight(scores_PG, accuracy_PG)
        result: Tensor = advantages_PG * weight_P.unsqueeze(1)
        if self.advantage_min is None and self.advantage_max is None:
            return result
        return result.clamp(self.advantage_min, self.advantage_max)

    def _advantage(self, scores_PG: Tensor, lengths_PG: Tensor | None) -> Tensor:
        if self.needs_lengths and lengths_PG is None:
            raise ValueError("the part algorithm/advantage of this algorithm needs advantages(lengths=...)")
        advantages_PG: Tensor = self.advantage(scores_PG, *([lengths_PG] if self.needs_lengths else []))
        return advantages_PG

    def kept(
        self,
        rewards: dict[str, Tensor],
        weights: dict[str, float] | None = None,
        accuracy: Sequence[str] | None = None,
    ) -> Tensor:
        """The groups [P] (bool) to train on, by the keep part. Arguments and errors are those of `advantages`."""
        rewards = checked_rewards(rewards, weights)
        kept_P: Tensor = self.keep(self._keep_reward(rewards, weights, accuracy))
        return kept_P

    def _keep_reward(
        self, rewards: dict[str, Tensor], weights: dict[str, float] | None, accuracy: Sequence[str] | None
    ) -> Tensor:
        """The reward [P, G] that must differ within a group."""
        name = self.keep.reward
        if name == SCORE and name not in rewards:
            return self.scores(rewards, weights)
        if name is not None:
            return rewards[_known("keep", name, rewards)]
        found_PG = _accuracy(rewards, accuracy)
        for values_PG in rewards.values():  # where accuracy does not apply to a group, the first reward that does
            found_PG = found_PG.where(~found_PG.isnan().all(1, keepdim=True), values_PG.to(found_PG.dtype))
        return found_PG

    def _normalize_then_sum(
        self,
        rewards: dict[str, Tensor],
        weights: dict[str, float] | None,
        scores_PG: Tensor,
        lengths_PG: Tensor | None,
    ) -> Tensor:
        total_PG = scores_PG * 0
        for name, values in rewards.items():
            normalized_PG = self._advantage(values.to(total_PG.dtype), lengths_PG)
            total_PG = total_PG + normalized_PG * _weight(weights, name)
        flat = total_PG.reshape(1, -1)
        normal_PG = (centred_PG(flat) / (std_P1(flat) + 1e-4)).reshape(total_PG.shape)
        # the mean is 0 up to rounding, which would give constant groups an advantage of about 1e-17
        return normal_PG.masked_fill(scores_PG.isnan() | constant_P1(total_PG), 0.0)

    def totals(
        self, advantages: Tensor, mask: Tensor, group_ids: Tensor | None = None, micro_batches: int = 1
    ) -> Totals:
        """The counts of a whole optimizer window [B] or [B, T], [B, T], [B], for `loss` of each part of the window."""
        return Totals.of(_by_row(advantages, mask), mask, _group_ids(advantages, group_ids), micro_batches)

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

        Without the term of `router_aux_loss_coef`, which needs the model's routers (`training/router_balance.py`).

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
        from grpocli.algorithm.metrics import loss_metrics

        check_rows(
            logp,
            {"old_logp": old_logp, "mask": mask, "ref_logp": ref_logp, "rollout_logp": rollout_logp}
            | {"entropy": entropy, "selected": selected}
            | ({"advantages": advantages} if advantages.ndim == 2 else {}),
            {"group_ids": group_ids} | ({"advantages": advantages} if advantages.ndim != 2 else {}),
        )
        whole = totals is None
        ids_B = self._ids(advantages, group_ids, whole)
        totals = totals or Totals.of(_by_row(advantages, mask), mask, ids_B)
        inside = mask.bool()
        if advantages.ndim == 2:
            advantages = advantages.where(inside, 0.0)
        logp, old_logp = logp.where(inside, 0.0), old_logp.where(inside, 0.0)
        sampler_logp = old_logp if rollout_logp is None else rollout_logp.where(inside, 0.0)
        if self.takes_sampler_as_old:
            old_logp = sampler_logp.detach()

        loss_BT, clipped = loss_and_flags(self.objective(logp, old_logp, advantages, mask))
        loss_BT = loss_BT * self.correction(old_logp, sampler_logp, mask)
        if self.tokens.needs_entropy:
            loss_BT = loss_BT * self._selected(selected, entropy, mask, whole)
        kl_BT = clamped_BT = None
        if self.needs_reference:
            ref_logp = _given(ref_logp, "ref_logp", "kl").where(inside, 0.0)
            kl_BT = self.kl(logp, old_logp, ref_logp)
            clamped_BT = self.kl.clamped(logp.detach(), ref_logp) if isinstance(self.kl, KL) else None
            loss_BT = loss_BT + self.kl.beta * kl_BT
        if self.needs_entropy_gradient:
            loss_BT = loss_BT - self.entropy(_given(entropy, "entropy", "entropy").where(inside, 0.0))
        weight_B = self.aggregate(mask, ids_B, totals).to(loss_BT.dtype)
        loss = ((loss_BT * mask).sum(1) * weight_B).sum()
        rollout_logp = None if rollout_logp is None else sampler_logp
        trainer_logp = logp.detach() if self.takes_sampler_as_old else old_logp
        return loss, loss_metrics(logp, trainer_logp, rollout_logp, mask, totals, clipped, kl_BT, clamped_BT)

    def clipped(self, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Whether the objective clips each token [B, T] (bool), on either side. Arguments are those of `loss`."""
        inside = mask.bool()
        if advantages.ndim == 2:
            advantages = advantages.where(inside, 0.0)
        logp, old_logp = logp.detach().where(inside, 0.0), old_logp.where(inside, 0.0)
        _, sides = loss_and_flags(self.objective(logp, old_logp, advantages, mask))
        found_BT = inside.new_zeros(inside.shape)
        for flags in sides.values():  # [B] for a sequence ratio
            found_BT = found_BT | (flags if flags.shape == inside.shape else flags.unsqueeze(1))
        return found_BT & inside

    def _ids(self, advantages: Tensor, group_ids: Tensor | None, whole: bool) -> Tensor:
        if group_ids is None and not whole:
            if getattr(self.aggregate, "needs_groups", True):  # a user's part may lack it
                raise ValueError("loss(totals=...) needs loss(group_ids=...), as in totals(group_ids=...)")
            return advantages.new_zeros(len(advantages)).long()
        return _group_ids(advantages, group_ids)

    def _selected(self, selected: Tensor | None, entropy: Tensor | None, mask: Tensor, whole: bool) -> Tensor:
        if selected is not None or not whole:  # only the caller knows the threshold of a whole window
            return _given(selected, "selected", "tokens")
        chosen: Tensor = self.tokens(_given(entropy, "entropy", "tokens").detach(), mask)
        return chosen


def _accuracy(rewards: dict[str, Tensor], names: Sequence[str] | None) -> Tensor:
    """The accuracy [P, G]: each group's reward of that name, by default the first reward."""
    import torch

    first_PG = next(iter(rewards.values()))
    if names is None or not len(first_PG):
        return first_PG
    check_accuracy(names, rewards)
    return torch.stack([rewards[name][p] for p, name in enumerate(names)])


def _known(kind: str, name: str, rewards: dict[str, Tensor]) -> str:
    """The name, if it is one of the rewards. Raises ConfigError otherwise. kind: the part that reads the reward."""
    if name not in rewards:
        choices = ", ".join(rewards)
        raise ConfigError(f"choose one of this run's rewards: {choices}", key=f"algorithm.{kind}.reward", value=name)
    return name


def _given(value: Tensor | None, name: str, kind: str) -> Tensor:
    if value is None:
        raise ValueError(f"the part algorithm/{kind} of this algorithm needs loss({name}=...)")
    return value


def _weight(weights: dict[str, float] | None, name: str) -> float:
    return 1.0 if weights is None else weights.get(name, 1.0)


def _group_ids(advantages: Tensor, group_ids: Tensor | None) -> Tensor:
    return advantages.new_ones(len(advantages)).long().cumsum(0) if group_ids is None else group_ids


def _by_row(advantages: Tensor, mask_BT: Tensor) -> Tensor:
    """Advantages [B] that are 0 where all of a row's are, of advantages [B] or [B, T]."""
    if advantages.ndim != 2:
        return advantages
    return ((advantages != 0) & mask_BT.bool()).any(1).to(advantages.dtype)
