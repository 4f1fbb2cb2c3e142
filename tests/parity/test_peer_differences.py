"""Definitions that differ in other trainers: the size of each difference, and a proof that it has no other cause.

Each proof returns ours, theirs, and ours with their definition put in by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from parity.peer_cases import DIFFERENCES
from parity.peer_sides import Rows
from parity.peers import LENGTHS, built, gradient, ours, random_rows, side
from parity.table import Table
from torch import Tensor

from grpocli.algorithm.objective import log_ratio

Three = tuple[Tensor, Tensor, Tensor]
Proof = Callable[[Rows], Three]
PROOFS: dict[str, Proof] = {}
LEAST = {"verl, NeMo RL: means over tokens": 1e-11, "SkyRL: maxrl": 1e-7}
IS = {"use_importance_sampling_correction": True}


def proves(name: str) -> Callable[[Proof], Proof]:
    def kept(proof: Proof) -> Proof:
        PROOFS[name] = proof
        return proof

    return kept


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_difference_is_the_one_of_the_definition(name: str, peer_table: Table) -> None:
    found = PROOFS[name](random_rows(0))
    one = DIFFERENCES[name]
    reason = f"theirs: {one.theirs}; ours: {one.ours}"
    peer_table.explain(name, *found, reason, least=LEAST.get(name, 1e-4), most=1e-7)


@proves("verl, NeMo RL: means over tokens")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(rows, loss_agg_mode="seq-mean-token-mean")
    return ours(built("GRPO"), rows), theirs, ours(built("GRPO", guard="rows"), rows)


@proves("verl: sapo, geo_mean")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(rows, loss_mode="sapo", tau_pos=1.5, tau_neg=1.75, loss_agg_mode="token-mean")
    return ours(built("TOKENS SAPO"), rows), theirs, ours(built("GRPO SAPO"), rows)


@proves("verl, SkyRL: rollout_is=sequence, tis_ratio_type=sequence")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(rows, rollout_is="sequence", rollout_is_threshold=1.5)
    mine = ours(built("TOKENS algorithm/correction=sequence_truncate correction.max=1.5"), rows)
    return mine, theirs, ours(built("TOKENS"), rows, advantages=rows.advantages * product(rows).clamp(max=1.5))


@proves("NeMo RL: use_importance_sampling_correction with sequence_level_importance_ratios")
def _(rows: Rows) -> Three:
    theirs = side("NeMo RL").loss(rows, token_level_loss=False, sequence_level_importance_ratios=True, **IS)
    mine = ours(built("GRPO SEQUENCE IMPORTANCE correction.weigh=sequence correction.max=inf"), rows)
    return mine, theirs, ours(built("GRPO SEQUENCE"), rows, advantages=rows.advantages * product(rows))


@proves("verl: rollout_rs, bounds of k1")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(
        rows,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.9_1.5",
        global_batch_info={"batch_num_tokens": int(rows.mask.sum())},
    )
    same = ours(built(dropped("sequence", 0.9, 1.5)), rows)
    return same, theirs, ours(built(dropped("sequence", 1 / 1.5, 1 / 0.9)), rows)


@proves("verl: rollout_rs, denominators")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(rows, rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    mine = ours(built(dropped("token", 0.5, 2.0)), rows)
    kept_BT = rows.mask * ((rows.old - rows.sampler).abs() <= math.log(2.0))
    return mine, theirs, mine * rows.mask.sum() / kept_BT.sum()


@proves("verl: gspo with rollout_is=token")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(
        rows, loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", rollout_is="token", rollout_is_threshold=1.3
    )
    mine = ours(built("GRPO SEQUENCE TRUNCATE correction.max=1.3"), rows)
    weight_BT = (rows.old - rows.sampler).exp().clamp(max=1.3)
    without = gradient(ours(built("GRPO SEQUENCE"), rows), rows)
    return gradient(mine, rows), gradient(theirs, rows), without * weight_BT


@proves("verl: geo_mean with rollout_is=token")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(
        rows, loss_mode="geo_mean", clip_ratio_high=0.28, rollout_is="token", rollout_is_threshold=1.3
    )
    mine = ours(built("GRPO GEOMETRIC TRUNCATE correction.max=1.3"), rows)
    log_weight_BT = (rows.old - rows.sampler).clamp(max=math.log(1.3)) * rows.mask
    weight_B = (log_weight_BT.sum(1) / rows.mask.sum(1)).exp()
    return mine, theirs, ours(built("GRPO GEOMETRIC"), rows, advantages=rows.advantages * weight_B)


@proves("verl: dppo_tv, dppo_kl")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(rows, loss_mode="dppo_tv", clip_ratio_low=0.1, clip_ratio_high=0.05, clip_ratio_c=1.05)
    mine = gradient(ours(built("TOKENS DPPO"), rows), rows)
    ratio_BT = (rows.logp - rows.old).exp().detach()
    return mine, gradient(theirs, rows), mine * ratio_BT.clamp(max=1.05) / ratio_BT


@proves("verl, NeMo RL, slime: cispo")
def _(rows: Rows) -> Three:
    theirs = side("verl").loss(rows, loss_mode="cispo", clip_ratio_high=0.28)
    return ours(built("TOKENS CISPO"), rows), theirs, ours(built("TOKENS CISPO_LOW"), rows)


@proves("NeMo RL: reference_policy_kl_penalty")
def _(rows: Rows) -> Three:
    theirs = side("NeMo RL").loss(rows, reference_policy_kl_penalty=0.04)
    mine = gradient(ours(built("TOKENS K3"), rows), rows)
    penalty = kl_gradient(rows, rows.logp.detach())
    return mine, gradient(theirs, rows), gradient(ours(built("TOKENS"), rows), rows) + penalty


@proves("NeMo RL: use_on_policy_kl_approximation")
def _(rows: Rows) -> Three:
    theirs = side("NeMo RL").loss(rows, reference_policy_kl_penalty=0.04, use_on_policy_kl_approximation=True)
    mine = gradient(ours(built("TOKENS K3 ON_POLICY"), rows), rows)
    penalty = kl_gradient(rows, rows.sampler)
    return mine, gradient(theirs, rows), gradient(ours(built("TOKENS"), rows), rows) + penalty


@proves("NeMo RL: adv_estimator=opd with icepop")
def _(rows: Rows) -> Three:
    rows = random_rows(0, "first")
    settings = {"truncated_importance_sampling_ratio": 1.3, "truncated_importance_sampling_ratio_min": 0.7}
    theirs = side("NeMo RL").loss(
        rows,
        adv_estimator="opd",
        disable_ppo_ratio=True,
        truncated_importance_sampling_type="icepop",
        **IS,
        **settings,
    )
    corrected = "MASK correction.max=1.3 correction.min=0.7"
    mine = ours(built(f"TOKENS DISTILLED {corrected}"), rows, advantages=rows.advantages * 0)
    per_token = ours(built(f"TOKENS PLAIN {corrected}"), rows, advantages=rows.ref - rows.old)
    return gradient(mine, rows), gradient(theirs, rows), gradient(per_token, rows)


@proves("slime: use_opd")
def _(rows: Rows) -> Three:
    theirs = side("slime").loss(rows, use_opd=True, opd_kl_coef=0.5)
    mine = ours(built("GRPO algorithm/kl=reverse kl.beta=0.5"), rows)
    advantages_BT = rows.advantages.unsqueeze(1) - 0.5 * (rows.old - rows.ref)
    return mine, theirs, ours(built("GRPO"), rows, advantages=advantages_BT)


@proves("prime-rl: ref_kl (opd)")
def _(rows: Rows) -> Three:
    theirs = side("prime-rl").loss(rows, loss="ref_kl")
    drift = "algorithm/objective=dppo objective.drift=0.001"
    mine = ours(built(f"TOKENS DISTILLED SAMPLER {drift}"), rows, advantages=rows.advantages * 0)
    fallen_BT = rows.mask * (rows.logp.exp() - rows.sampler.exp() < -0.2)
    lost_BT = (rows.logp - rows.sampler).exp() * (rows.logp - rows.ref).detach() * fallen_BT
    return mine, theirs, mine - lost_BT.sum() / rows.mask.sum()


@proves("slime: kl_loss_type=k3")
def _(rows: Rows) -> Three:
    rows = replace(rows, ref=(rows.logp.detach() + 2.0).where(rows.logp < -2.1, rows.ref - 12.0))
    theirs = side("slime").loss(rows, use_kl_loss=True, kl_loss_type="k3")
    x_BT = rows.ref - rows.logp
    over_BT = (x_BT.exp() - x_BT - 11).clamp(min=0) * rows.mask
    mine = ours(built("GRPO K3"), rows)
    return mine, theirs, mine + 0.04 * (over_BT.sum(1) / rows.mask.sum(1)).mean()


@proves("NeMo RL: adv_estimator=grpo, its default")
def _(rows: Rows) -> Three:
    scores_PG = some_scores()
    theirs = side("NeMo RL").advantages(scores_PG, torch.ones(scores_PG.shape))[:, :, 0]
    others = "OTHERS advantage.scale=others"
    mine, scaled = (built(f"algorithm=grpo {words}").advantages({"score": scores_PG}) for words in ("STD", others))
    return mine, theirs, scaled


@proves("verl: reinforce_plus_plus_baseline")
def _(rows: Rows) -> Three:
    scores_PG, lengths_PG = some_scores(), torch.tensor([LENGTHS[:4], LENGTHS[4:]])
    theirs = side("verl").advantages(scores_PG, lengths_PG, adv_estimator="reinforce_plus_plus_baseline")[:, :, 0]
    mine = built("algorithm=grpo PP").advantages({"score": scores_PG}, lengths=lengths_PG)
    n = lengths_PG.sum()
    return mine, theirs, mine * ((n - 1) / n).sqrt()


@proves("verl, SkyRL: grpo, a group of one completion")
def _(rows: Rows) -> Three:
    scores_PG = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    theirs = side("verl").advantages(scores_PG, torch.ones(2, 1), adv_estimator="grpo", epsilon=0.0)[:, :, 0]
    return built("algorithm=grpo STD").advantages({"score": scores_PG}), theirs, scores_PG


@proves("SkyRL: maxrl")
def _(rows: Rows) -> Three:
    scores_PG = some_scores()
    theirs = side("SkyRL").advantages(scores_PG, torch.ones(scores_PG.shape), advantage_estimator="maxrl")[:, :, 0]
    mine = built("algorithm=grpo algorithm/advantage=max_rl").advantages({"score": scores_PG})
    mean_P1 = scores_PG.mean(1, keepdim=True)
    return mine, theirs, mine * mean_P1 / (mean_P1 + 1e-6)


def dropped(level: str, low: float, high: float) -> str:
    """A token mean with a filter by the ratio of a token or of a sequence, without a weight."""
    return (
        f"TOKENS IMPORTANCE correction.weigh=none correction.drop={level} correction.low={low} correction.high={high}"
    )


def product(rows: Rows) -> Tensor:
    """Π_t π_old / μ of each row [B]."""
    mean_B1 = log_ratio(rows.old, rows.sampler, rows.mask, "sequence")
    return (mean_B1.squeeze(1) * rows.mask.sum(1)).exp()


def kl_gradient(rows: Rows, old_BT: Tensor) -> Tensor:
    """The gradient of k3 that is weighted by π / `old`."""
    weighted, without = (
        gradient(ours(built(f"TOKENS {penalty}"), rows, old_logp=old_BT), rows)
        for penalty in ("K3 ON_POLICY", "algorithm/kl=none")
    )
    return weighted - without


def some_scores() -> Tensor:
    return torch.tensor([[1.0, 0.25, 0.5, 0.0], [0.5, 0.75, 0.0, 0.125]], dtype=torch.float64)
