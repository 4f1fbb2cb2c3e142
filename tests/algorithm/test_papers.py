"""Each algorithm against its paper's formula, written out with loops in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from composed import built

from grpocli.composition.hydra_sources import conf_dir

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


def ratios(batch: dict[str, torch.Tensor], i: int, k: int) -> list[torch.Tensor]:
    """pi / pi_old of every token of completion k of question i."""
    row = i * G + k
    return [torch.exp(batch["logp"][row, t] - batch["old"][row, t]) for t in range(length(batch, i, k))]


def of_sequence(batch: dict[str, torch.Tensor], i: int, k: int, low: float, high: float) -> torch.Tensor:
    """min(s A, clip(s) A) with the length-normalised ratio s."""
    s = math.prod(ratios(batch, i, k)) ** (1 / length(batch, i, k))
    return clipped(s, standardised(batch["rewards"][i], k), low, high)


def near(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with ratios near 1, as GSPO's narrow bounds want them."""
    logp = batch["logp"].detach()
    return batch | {"old": logp + 0.01 * (batch["old"] - logp)}


ALL = [(i, k) for i in range(P) for k in range(G)]


def test_gspo(batch: dict[str, torch.Tensor]) -> None:
    """GSPO, equation 5, with the clipping ranges of section 5.1."""
    batch = near(batch)
    assert_same(batch, -sum(of_sequence(batch, i, k, 3e-4, 4e-4) for i, k in ALL) / (P * G), "algorithm=gspo")


def test_luspo(batch: dict[str, torch.Tensor]) -> None:
    """LUSPO: GSPO's term times |o|, with the clipping ranges of section 5.1."""
    batch = near(batch)
    objective = sum(of_sequence(batch, i, k, 2e-3, 2.5e-3) * length(batch, i, k) for i, k in ALL)
    assert_same(batch, -objective / (P * G), "algorithm=luspo")


def test_cispo(batch: dict[str, torch.Tensor]) -> None:
    """MiniMax-M1, equation 4, with a denominator over the whole batch; a weight of at most 5."""
    objective = 0.0
    for i, k in ALL:
        for t, r in enumerate(ratios(batch, i, k)):
            weight = min(r.item(), 5.0)
            objective = objective + weight * standardised(batch["rewards"][i], k) * batch["logp"][i * G + k, t]
    assert_same(batch, -objective / int(batch["mask"].sum()), "algorithm=cispo")


def test_sapo(batch: dict[str, torch.Tensor]) -> None:
    """SAPO, equations 5 and 6, with the temperatures of section 5."""
    objective = 0.0
    for i, k in ALL:
        a = standardised(batch["rewards"][i], k)
        tau = 1.0 if a > 0 else 1.05
        gates = [4 / tau / (1 + torch.exp(-tau * (r - 1))) for r in ratios(batch, i, k)]
        objective = objective + sum(gates) * a / length(batch, i, k)
    assert_same(batch, -objective / (P * G), "algorithm=sapo")


def test_gmpo(batch: dict[str, torch.Tensor]) -> None:
    """GMPO, equation 4, with the clipping range (exp(-0.4), exp(0.4))."""
    objective = 0.0
    for i, k in ALL:
        a = standardised(batch["rewards"][i], k)
        bounded = [r.clamp(max=math.exp(0.4)) if a > 0 else r.clamp(min=math.exp(-0.4)) for r in ratios(batch, i, k)]
        objective = objective + math.prod(bounded) ** (1 / length(batch, i, k)) * a
    assert_same(batch, -objective / (P * G), "algorithm=gmpo")


def squared_log_ratios(batch: dict[str, torch.Tensor], i: int, k: int) -> torch.Tensor:
    """sum_t log^2(pi / pi_ref) / 2."""
    row, n = i * G + k, length(batch, i, k)
    return sum((batch["logp"][row, t] - batch["ref"][row, t]) ** 2 / 2 for t in range(n))


def test_rloo(batch: dict[str, torch.Tensor]) -> None:
    """RLOO, equation 9: (R_k - mean of the others) log pi(y), with KL 0.03."""
    objective = 0.0
    for i, k in ALL:
        r = batch["rewards"][i].tolist()
        a = r[k] - (sum(r) - r[k]) / (G - 1)
        logp = batch["logp"][i * G + k, : length(batch, i, k)].sum()
        objective = objective + a * logp - 0.03 * squared_log_ratios(batch, i, k)
    assert_same(batch, -objective / (P * G), "algorithm=rloo")


def test_reinforce_pp(batch: dict[str, torch.Tensor]) -> None:
    """REINFORCE++-baseline: centred by question, divided by the std of the batch; PPO's clip and k2."""
    centred = batch["rewards"] - batch["rewards"].mean(1, keepdim=True)
    scale = math.sqrt((centred**2).sum().item() / (P * G - 1)) + 1e-8
    objective = 0.0
    for i, k in ALL:
        a = centred[i, k].item() / scale
        objective = objective + sum(clipped(r, a, 0.2, 0.2) for r in ratios(batch, i, k))
        objective = objective - 1e-5 * squared_log_ratios(batch, i, k)
    assert_same(batch, -objective / int(batch["mask"].sum()), "algorithm=reinforce_pp")


def test_maxrl(batch: dict[str, torch.Tensor]) -> None:
    """MaxRL: the advantage divided by the pass rate."""
    objective = 0.0
    for i, k in ALL:
        rate = batch["rewards"][i].mean().item()
        a = (batch["rewards"][i, k].item() - rate) / rate
        objective = objective + sum(clipped(r, a, 0.2, 0.2) for r in ratios(batch, i, k))
    assert_same(batch, -objective / int(batch["mask"].sum()), "algorithm=maxrl")


def test_dppo(batch: dict[str, torch.Tensor]) -> None:
    """prime-rl's default advantage and loss: dppo_mask_low and _high 0.2, adv_tau 1, kl_tau 1e-3, mean over tokens."""
    loss = 0.0
    for i, k in ALL:
        a = (batch["rewards"][i, k] - batch["rewards"][i].mean()).item()
        for t, r in enumerate(ratios(batch, i, k)):
            at = (i * G + k, t)
            change = math.exp(batch["logp"][at].item()) - math.exp(batch["old"][at].item())
            invalid = change > 0.2 if a > 0 else change < -0.2
            loss = loss - (0.0 if invalid else a) * r + 1e-3 * torch.log(r) ** 2
    assert_same(batch, loss / int(batch["mask"].sum()), "algorithm=dppo")


def test_every_named_algorithm_is_here() -> None:
    """A new `conf/algorithm/NAME.yaml` needs its paper's formula in this file."""
    names = {path.stem for path in (Path(conf_dir()) / "algorithm").glob("*.yaml")}
    tested = {name.removeprefix("test_").replace("dr_grpo", "drgrpo") for name in globals() if name.startswith("test_")}
    assert names <= tested | {"opd", "sft"}  # distillation and supervised training have their own tests
