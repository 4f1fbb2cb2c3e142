"""Each algorithm against its paper's formula, written out with loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
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


Tokens = list[torch.Tensor]
"""A tensor for each token of a completion."""


def ratios(batch: dict[str, torch.Tensor], i: int, k: int) -> Tokens:
    """pi / pi_old of every token of completion k of question i."""
    row = i * G + k
    return [torch.exp(batch["logp"][row, t] - batch["old"][row, t]) for t in range(length(batch, i, k))]


def length(batch: dict[str, torch.Tensor], i: int, k: int) -> int:
    return int(batch["mask"][i * G + k].sum())


def clipped(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clips(low: float, high: float) -> Callable[..., torch.Tensor]:
    """sum_t min(r_t A, clip(r_t) A)."""
    return lambda batch, i, k, a: sum(clipped(r, a, low, high) for r in ratios(batch, i, k))


def of_sequence(low: float, high: float) -> Callable[..., torch.Tensor]:
    """min(s A, clip(s) A) with the length-normalised ratio s."""
    return lambda batch, i, k, a: clipped(math.prod(ratios(batch, i, k)) ** (1 / length(batch, i, k)), a, low, high)


def cispo(batch: dict[str, torch.Tensor], i: int, k: int, a: float) -> torch.Tensor:
    """MiniMax-M1, equation 4: a weight of at most 5."""
    return sum(min(r.item(), 5.0) * a * batch["logp"][i * G + k, t] for t, r in enumerate(ratios(batch, i, k)))


def sapo(batch: dict[str, torch.Tensor], i: int, k: int, a: float) -> torch.Tensor:
    """SAPO, equations 5 and 6, with the temperatures of section 5."""
    tau = 1.0 if a > 0 else 1.05
    return sum(4 / tau / (1 + torch.exp(-tau * (r - 1))) for r in ratios(batch, i, k)) * a


def gmpo(batch: dict[str, torch.Tensor], i: int, k: int, a: float) -> torch.Tensor:
    """GMPO, equation 4, with the clipping range (exp(-0.4), exp(0.4))."""
    bounded = [r.clamp(max=math.exp(0.4)) if a > 0 else r.clamp(min=math.exp(-0.4)) for r in ratios(batch, i, k)]
    return math.prod(bounded) ** (1 / length(batch, i, k)) * a


def dppo(batch: dict[str, torch.Tensor], i: int, k: int, a: float) -> torch.Tensor:
    """prime-rl's default loss: dppo_mask_low and _high 0.2, adv_tau 1, kl_tau 1e-3."""
    total = 0.0
    for t, r in enumerate(ratios(batch, i, k)):
        at = (i * G + k, t)
        change = math.exp(batch["logp"][at].item()) - math.exp(batch["old"][at].item())
        invalid = change > 0.2 if a > 0 else change < -0.2
        total = total + (0.0 if invalid else a) * r - 1e-3 * torch.log(r) ** 2
    return total


def log_prob(batch: dict[str, torch.Tensor], i: int, k: int, a: float) -> torch.Tensor:
    """A log pi(y)."""
    return a * batch["logp"][i * G + k, : length(batch, i, k)].sum()


def gaps(batch: dict[str, torch.Tensor], i: int, k: int) -> Tokens:
    """log(pi_ref / pi) of every token."""
    row = i * G + k
    return [batch["ref"][row, t] - batch["logp"][row, t] for t in range(length(batch, i, k))]


def k2(batch: dict[str, torch.Tensor], i: int, k: int) -> torch.Tensor:
    return sum(z**2 / 2 for z in gaps(batch, i, k))


def k3(batch: dict[str, torch.Tensor], i: int, k: int) -> torch.Tensor:
    return sum(torch.exp(z) - z - 1 for z in gaps(batch, i, k))


def centred(rewards: torch.Tensor, i: int, k: int) -> float:
    return rewards[i, k].item() - rewards[i].mean().item()


def standardised(rewards: torch.Tensor, i: int, k: int) -> float:
    std = math.sqrt(sum(centred(rewards, i, j) ** 2 for j in range(G)) / (G - 1))
    return centred(rewards, i, k) / (std + 1e-4)


def of_batch(rewards: torch.Tensor, i: int, k: int) -> float:
    """Centred by question, divided by the std of the batch."""
    return centred(rewards, i, k) / (math.sqrt(sum(centred(rewards, *at) ** 2 for at in ALL) / (P * G - 1)) + 1e-8)


def leave_one_out(rewards: torch.Tensor, i: int, k: int) -> float:
    """R_k - mean of the others."""
    return rewards[i, k].item() - (rewards[i].sum() - rewards[i, k]).item() / (G - 1)


def by_pass_rate(rewards: torch.Tensor, i: int, k: int) -> float:
    return centred(rewards, i, k) / rewards[i].mean().item()


def difficult(rewards: torch.Tensor, i: int, k: int) -> float:
    """MAD, weights N softmax(-accuracy / T) over informative questions."""
    informative = [j for j in range(P) if rewards[j].unique().numel() > 1]
    if i not in informative:
        return 0.0
    total = sum(math.exp(-rewards[j].mean().item() / 2.0) for j in informative)
    weight = len(informative) * math.exp(-rewards[i].mean().item() / 2.0) / total
    return weight * centred(rewards, i, k) / ((rewards[i] - rewards[i].mean()).abs().mean().item() + 1e-4)


def tokens(batch: dict[str, torch.Tensor], i: int, k: int) -> int:
    """A denominator over the whole batch."""
    return int(batch["mask"].sum())


def informative_tokens(batch: dict[str, torch.Tensor], i: int, k: int) -> int:
    return sum(length(batch, i, k) for i, k in ALL if batch["rewards"][i].unique().numel() > 1)


def sequences(batch: dict[str, torch.Tensor], i: int, k: int) -> int:
    """The mean over completions of the sum over tokens."""
    return P * G


def means(batch: dict[str, torch.Tensor], i: int, k: int) -> int:
    """The mean over completions of the mean over tokens."""
    return P * G * length(batch, i, k)


ALL = [(i, k) for i in range(P) for k in range(G)]
PAPERS = {  # advantage, term of a completion, its divisor, KL term and coefficient, further overrides
    "grpo": (standardised, clips(0.2, 0.2), means, k3, 0.04),  # DeepSeekMath, equation 3
    "dapo": (standardised, clips(0.2, 0.28), tokens, None, 0.0),  # equation 8, over the whole batch
    "drgrpo": (centred, clips(0.2, 0.2), lambda *_: P * G * 100, None, 0.0, "algorithm.aggregate.length=100"),
    "dgpo": (difficult, clips(0.2, 0.2), informative_tokens, None, 0.0),  # MathForge
    "gspo": (standardised, of_sequence(3e-4, 4e-4), sequences, None, 0.0),  # equation 5, section 5.1
    "luspo": (  # GSPO's term times |o|, with the clipping ranges of section 5.1
        standardised,
        lambda batch, i, k, a: of_sequence(2e-3, 2.5e-3)(batch, i, k, a) * length(batch, i, k),
        sequences,
        None,
        0.0,
    ),
    "cispo": (standardised, cispo, tokens, None, 0.0),
    "sapo": (standardised, sapo, means, None, 0.0),
    "gmpo": (standardised, gmpo, sequences, None, 0.0),
    "rloo": (leave_one_out, log_prob, sequences, k2, 0.03),  # RLOO, equation 9
    "reinforce_pp": (of_batch, clips(0.2, 0.2), tokens, k2, 1e-5),  # REINFORCE++-baseline
    "maxrl": (by_pass_rate, clips(0.2, 0.2), tokens, None, 0.0),
    "dppo": (centred, dppo, tokens, None, 0.0),
}


@pytest.mark.parametrize("name", PAPERS)
def test_an_algorithm_is_its_papers_formula(batch: dict[str, torch.Tensor], name: str) -> None:
    advantage, term, divisor, kl, beta, *overrides = PAPERS[name]
    if name in ("gspo", "luspo"):  # ratios near 1, as GSPO's narrow bounds want them
        logp = batch["logp"].detach()
        batch = batch | {"old": logp + 0.01 * (batch["old"] - logp)}
    objective = 0.0
    for i, k in ALL:
        gain = term(batch, i, k, advantage(batch["rewards"], i, k)) - (beta * kl(batch, i, k) if kl else 0.0)
        objective = objective + gain / divisor(batch, i, k)
    algorithm = built(f"algorithm={name}", *overrides)
    loss, _ = algorithm.loss(
        batch["logp"],
        batch["old"],
        algorithm.advantages({"accuracy": batch["rewards"]}).reshape(-1),
        batch["mask"],
        group_ids=batch["groups"],
        ref_logp=batch["ref"],
    )
    torch.testing.assert_close(loss, -objective, rtol=1e-10, atol=1e-14)
    theirs, ours = (torch.autograd.grad(x, batch["logp"], retain_graph=True)[0] for x in (-objective, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_every_named_algorithm_is_here() -> None:
    """A new `conf/algorithm/NAME.yaml` needs its paper's formula in this file."""
    names = {path.stem for path in (Path(conf_dir()) / "algorithm").glob("*.yaml")}
    assert names == PAPERS.keys() | {"opd", "sft"}  # distillation and supervised training have their own tests
