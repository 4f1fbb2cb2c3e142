"""Definitions that differ in TRL: the size of each difference, and a proof that it has no other cause.

Each test computes ours, TRL's, and ours with TRL's definition put in by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity import cases as trl
from parity.cases import Case, case, our_loss
from parity.table import Table
from parity.trl_side import Peer, random_batch
from torch import Tensor

from grpocli import build_algorithm
from grpocli.algorithm.objective import log_ratio

DTYPE = torch.float64


def sampled(one: Case, folder: Path) -> tuple[Peer, Tensor]:
    """A peer with a batch, and the advantages [B]."""
    peer = one.peer(folder)
    peer.sample(one.batch(DTYPE, 0))
    return peer, peer.advantages.to(DTYPE)


def ours(peer: Peer, advantages: Tensor, *overrides: str) -> Tensor:
    batch = peer.batch
    return our_loss(build_algorithm(*overrides), batch, batch.logp, batch.entropy, advantages, peer.mask)[0]


def token_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (values_BT * mask_BT).sum() / mask_BT.sum()


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return ((values_BT * mask_BT).sum(1) / mask_BT.sum(1)).mean()


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_the_sequence_ratio_is_a_product_in_trl(mode: str, table: Table, folder: Path) -> None:
    settings = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 1.5,
    }
    overrides = (f"algorithm/correction={mode}", "algorithm.correction.min=0.5", "algorithm.correction.max=1.5")
    peer, advantages = sampled(case(mode, "dapo", settings, (), sampler=True), folder)
    batch, mask = peer.batch, peer.mask
    # a weight of a row can be applied to its advantage, since the clip's term is proportional to it
    mean_B1 = log_ratio(batch.old_logp, batch.rollout_logp, mask, "sequence")
    product_B1 = (mean_B1 * mask.sum(1, keepdim=True)).exp()
    inside_B1 = (product_B1 >= 0.5) & (product_B1 <= 1.5)
    bound_B1 = product_B1.clamp(0.5, 1.5) if mode == "sequence_truncate" else product_B1 * inside_B1
    table.explain(
        f"dapo, {mode}",
        ours(peer, advantages, *trl.DAPO, *overrides),
        peer.losses()[0],
        ours(peer, advantages * bound_B1.squeeze(1), *trl.DAPO),
        "TRL's sequence ratio is the product of its tokens', ours their geometric mean",
    )


def test_the_kl_is_weighted_by_the_sequence_ratio_in_trl(table: Table, folder: Path) -> None:
    peer, advantages = sampled(case("grpo", "grpo", trl.SEQUENCE | trl.KL_WEIGHTED, ()), folder)
    batch, mask = peer.batch, peer.mask
    kl = build_algorithm(*trl.GRPO, *trl.OUR_KL).kl
    ratio_B1 = log_ratio(batch.logp, batch.old_logp, mask, "sequence").exp()
    penalty = kl.beta * sequence_mean(kl.estimate(batch.ref_logp - batch.logp) * ratio_B1, mask)
    table.explain(
        "grpo, sequence level, KL x ratio",
        ours(peer, advantages, *trl.GRPO, *trl.OUR_SEQUENCE, *trl.OUR_KL_WEIGHTED),
        peer.losses()[0],
        ours(peer, advantages, *trl.GRPO, *trl.OUR_SEQUENCE) + penalty,
        "TRL weights each token's KL by the ratio of the sequence, ours by that of the token",
    )


def test_the_entropy_bonus_is_a_token_mean_in_trl(table: Table, folder: Path) -> None:
    peer, advantages = sampled(case("grpo", "grpo", trl.BONUS, ()), folder)
    bonus = trl.BONUS["entropy_coef"] * token_mean(peer.batch.entropy, peer.mask)
    table.explain(
        "grpo, entropy bonus",
        ours(peer, advantages, *trl.GRPO, *trl.OUR_BONUS),
        peer.losses()[0],
        ours(peer, advantages, *trl.GRPO) - bonus,
        "TRL's bonus is a token mean whatever the loss; ours is aggregated as the loss is",
    )


def test_the_entropy_bonus_is_of_selected_tokens_in_trl(table: Table, folder: Path) -> None:
    peer, advantages = sampled(case("dapo", "dapo", trl.BONUS | trl.TOP, ()), folder)
    entropy, mask = peer.batch.entropy, peer.mask
    selected = build_algorithm(*trl.DAPO, *trl.OUR_TOP).tokens(entropy, mask)
    bonus = trl.BONUS["entropy_coef"] * token_mean(entropy, selected)
    table.explain(
        "dapo, top entropy, entropy bonus",
        ours(peer, advantages, *trl.DAPO, *trl.OUR_TOP, *trl.OUR_BONUS),
        peer.losses()[0],
        ours(peer, advantages, *trl.DAPO, *trl.OUR_TOP) - bonus,
        "TRL's bonus is over the selected tokens, ours over all",
    )


def test_the_entropy_threshold_is_a_micro_batchs_in_trl(table: Table, folder: Path) -> None:
    peer, advantages = sampled(case("dapo", "dapo", trl.TOP | trl.KL, (), pieces=2), folder)
    batch, mask = peer.batch, peer.mask
    algorithm = build_algorithm(*trl.DAPO, *trl.OUR_TOP, *trl.OUR_KL)
    selected = torch.cat([algorithm.tokens(e, m) for e, m in zip(batch.entropy.chunk(2), mask.chunk(2), strict=True)])
    by_piece, _ = algorithm.loss(
        batch.logp, batch.old_logp, advantages, mask, ref_logp=batch.ref_logp, selected=selected
    )
    table.explain(
        "dapo, top entropy, 2 micro-batches",
        ours(peer, advantages, *trl.DAPO, *trl.OUR_TOP, *trl.OUR_KL),
        torch.stack(peer.losses()).sum(),
        by_piece,
        "TRL's threshold is a quantile of the micro-batch, ours of the optimizer window",
    )


def test_several_updates_a_rollout_share_a_denominator_in_trl(table: Table, folder: Path) -> None:
    one = case("dapo", "dapo", {"gradient_accumulation_steps": 1, "steps_per_generation": 2}, (), pieces=2)
    peer, advantages = sampled(one, folder)
    batch, mask = peer.batch, peer.mask
    algorithm = build_algorithm(*trl.DAPO)
    updates = torch.arange(len(mask)).chunk(2)
    losses = torch.stack([algorithm.loss(batch.logp[r], batch.old_logp[r], advantages[r], mask[r])[0] for r in updates])
    tokens = torch.stack([mask[r].sum() for r in updates])
    table.explain(
        "dapo, 2 updates a rollout",
        losses,
        torch.stack(peer.losses()),
        losses * tokens / (tokens.sum() / 2),
        "TRL divides each update by the rollout's tokens / updates, ours by its own tokens",
    )


def test_a_constant_group_has_rounding_errors_for_advantages_in_trl(table: Table, folder: Path) -> None:
    group = 2 * trl.GROUP
    peer = Peer(folder, 2 * group, 2, {"score": [0.7] * group + [0.1] * group}, num_generations=group)
    peer.sample(random_batch(torch.float32, 0, (2,) * 2 * group))
    scores = torch.tensor([[0.7] * group, [0.1] * group])
    zero = build_algorithm("algorithm=grpo").advantages({"score": scores})
    rounding = scores - torch.nanmean(scores, dim=1, keepdim=True)
    spread = rounding.square().mean(1, keepdim=True).mul(group / (group - 1)).sqrt()
    table.explain(
        "advantages, std, constant groups",
        zero.flatten(),
        peer.advantages,
        (rounding / (spread + 1e-4)).flatten(),
        "TRL divides the rounding error of the mean by 1e-4; a constant group has no advantage in ours",
    )
