"""Each algorithm against its paper's formula, written out with loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from composed import built

P, G, T = 3, 4, 6


@pytest.fixture(params=range(3))
def batch(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(request.param)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, T + 1, (P * G,), generator=g)
    rewards = torch.randint(0, 2, (P, G), generator=g).double()
    rewards[0] = 1.0  # a constant group
    rewards[1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    rewards[2] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    logp = -normal(P * G, T).abs()
    return {
        "rewards": rewards,
        "logp": logp.requires_grad_(),
        "old": (logp + 0.3 * normal(P * G, T)).detach(),
        "ref": (logp + 0.3 * normal(P * G, T)).detach(),
        "mask": (torch.arange(T) < lengths[:, None]).long(),
        "groups": torch.arange(P).repeat_interleave(G),
    }


def ours(batch: dict[str, torch.Tensor], *overrides: str) -> tuple[torch.Tensor, torch.Tensor]:
    algorithm = built(*overrides)
    advantages = algorithm.advantages({"accuracy": batch["rewards"]})
    loss, _ = algorithm.loss(
        batch["logp"],
        batch["old"],
        advantages.reshape(-1),
        batch["mask"],
        group_ids=batch["groups"],
        ref_logp=batch["ref"],
    )
    return loss, torch.autograd.grad(loss, batch["logp"])[0]


def clipped(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def terms(batch: dict[str, torch.Tensor], i: int, k: int, advantage: float, high: float, beta: float):
    """The objective's terms of every token of completion k of question i."""
    row = i * G + k
    for t in range(int(batch["mask"][row].sum())):
        logp, old, ref = batch["logp"][row, t], batch["old"][row, t], batch["ref"][row, t]
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        yield clipped(torch.exp(logp - old), advantage, 0.2, high) - beta * kl


def length(batch: dict[str, torch.Tensor], i: int, k: int) -> int:
    return int(batch["mask"][i * G + k].sum())


def standardised(rewards: torch.Tensor, k: int) -> float:
    mean = sum(rewards.tolist()) / G
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards.tolist()) / (G - 1))
    return (rewards[k].item() - mean) / (std + 1e-4)


def assert_same(batch: dict[str, torch.Tensor], loss: torch.Tensor, *overrides: str) -> None:
    gradient = torch.autograd.grad(loss, batch["logp"])[0]
    our_loss, our_gradient = ours(batch, *overrides)
    torch.testing.assert_close(our_loss, loss, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-10, atol=1e-14)


def test_grpo(batch: dict[str, torch.Tensor]) -> None:
    """DeepSeekMath, equation 3."""
    objective = sum(
        sum(terms(batch, i, k, standardised(batch["rewards"][i], k), 0.2, 0.04)) / length(batch, i, k)
        for i in range(P)
        for k in range(G)
    )
    assert_same(batch, -objective / (P * G), "algorithm=grpo")


def test_dapo(batch: dict[str, torch.Tensor]) -> None:
    """DAPO, equation 8, with a denominator over the whole batch."""
    total = int(batch["mask"].sum())
    objective = sum(
        sum(terms(batch, i, k, standardised(batch["rewards"][i], k), 0.28, 0.0)) for i in range(P) for k in range(G)
    )
    assert_same(batch, -objective / total, "algorithm=dapo")


def test_dapo_with_each_groups_own_denominator(batch: dict[str, torch.Tensor]) -> None:
    """DAPO, equation 8, literally: 1 / sum |o_i| inside the expectation over questions."""
    objective = 0.0
    for i in range(P):
        tokens = sum(length(batch, i, k) for k in range(G))
        objective += sum(
            sum(terms(batch, i, k, standardised(batch["rewards"][i], k), 0.28, 0.0)) / tokens for k in range(G)
        )
    assert_same(batch, -objective / P, "algorithm=dapo", "algorithm.aggregate.scope=group")


def test_dr_grpo(batch: dict[str, torch.Tensor]) -> None:
    """Dr. GRPO, section 3: no standard deviation, a constant length."""
    objective = sum(
        sum(terms(batch, i, k, (batch["rewards"][i, k] - batch["rewards"][i].mean()).item(), 0.2, 0.0))
        for i in range(P)
        for k in range(G)
    )
    assert_same(batch, -objective / (P * G * 100), "algorithm=drgrpo", "algorithm.aggregate.length=100")


def test_dgpo(batch: dict[str, torch.Tensor]) -> None:
    """MathForge: MAD, weights N softmax(-accuracy / T) over informative questions, only their tokens counted."""
    informative = [i for i in range(P) if batch["rewards"][i].unique().numel() > 1]
    accuracy = {i: batch["rewards"][i].mean().item() for i in informative}
    normaliser = sum(math.exp(-accuracy[i] / 2.0) for i in informative)
    tokens = sum(length(batch, i, k) for i in informative for k in range(G))
    objective = 0.0
    for i in informative:
        rewards = batch["rewards"][i]
        mad = (rewards - rewards.mean()).abs().mean().item()
        weight = len(informative) * math.exp(-accuracy[i] / 2.0) / normaliser
        for k in range(G):
            advantage = weight * (rewards[k] - rewards.mean()).item() / (mad + 1e-4)
            objective += sum(terms(batch, i, k, advantage, 0.2, 0.0))
    assert_same(batch, -objective / tokens, "algorithm=dgpo")


def test_the_correction_uses_the_policy_that_sampled(batch: dict[str, torch.Tensor]) -> None:
    """rho = pi_old of the trainer / pi_old of the sampler, at most 2 (NeMo RL's guide)."""
    algorithm = built("algorithm=drgrpo", "algorithm.aggregate.length=1", "algorithm/correction=token_truncate")
    sampler = batch["ref"]
    advantages = algorithm.advantages({"accuracy": batch["rewards"]}).reshape(-1)
    loss, _ = algorithm.loss(
        batch["logp"], batch["old"], advantages, batch["mask"], group_ids=batch["groups"], rollout_logp=sampler
    )
    objective = 0.0
    for i in range(P):
        for k in range(G):
            row = i * G + k
            tokens = terms(batch, i, k, advantages[row].item(), 0.2, 0.0)
            for t, term in enumerate(tokens):
                objective += term * torch.exp(batch["old"][row, t] - sampler[row, t]).clamp(max=2.0)
    torch.testing.assert_close(loss, -objective / (P * G), rtol=1e-10, atol=1e-14)
