"""Each algorithm against its paper's formula, written out with loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from algorithm.literal import Batch, G, P, assert_same, clip, make_batch, outputs, smaller

from grpocli.composition.hydra_sources import conf_dir

RIGHT = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1]], dtype=torch.float64)  # the first is constant


@pytest.fixture(params=range(3))
def batch(request: pytest.FixtureRequest) -> Batch:
    made = make_batch(request.param)
    return replace(made, rewards=RIGHT, sampler=made.old)


def ratios(batch: Batch, i: int, k: int) -> list[torch.Tensor]:
    """pi / pi_old of every token of completion k of question i."""
    return [batch.ratio(at) for at in batch.tokens(i, k)]


def length(batch: Batch, i: int, k: int) -> int:
    return len(batch.tokens(i, k))


Term = Callable[[Batch, int, int, float], torch.Tensor]


def clips(low: float, high: float) -> Term:
    """sum_t min(r_t A, clip(r_t) A)."""
    return lambda batch, i, k, a: sum(smaller(r * a, clip(r, 1 - low, 1 + high) * a) for r in ratios(batch, i, k))


def of_sequence(low: float, high: float) -> Term:
    """min(s A, clip(s) A) with the length-normalised ratio s."""

    def term(batch: Batch, i: int, k: int, a: float) -> torch.Tensor:
        s = math.prod(ratios(batch, i, k)) ** (1 / length(batch, i, k))
        return smaller(s * a, clip(s, 1 - low, 1 + high) * a)

    return term


def cispo(batch: Batch, i: int, k: int, a: float) -> torch.Tensor:
    """MiniMax-M1, equation 4: a weight of at most 5."""
    return sum(min(batch.ratio(at).item(), 5.0) * a * batch.logp[at] for at in batch.tokens(i, k))


def sapo(batch: Batch, i: int, k: int, a: float) -> torch.Tensor:
    """SAPO, equations 5 and 6, with the temperatures of section 5."""
    tau = 1.0 if a > 0 else 1.05
    return sum(4 / tau / (1 + torch.exp(-tau * (r - 1))) for r in ratios(batch, i, k)) * a


def gmpo(batch: Batch, i: int, k: int, a: float) -> torch.Tensor:
    """GMPO, equation 4, with the clipping range (exp(-0.4), exp(0.4))."""
    bounded = [r.clamp(max=math.exp(0.4)) if a > 0 else r.clamp(min=math.exp(-0.4)) for r in ratios(batch, i, k)]
    return math.prod(bounded) ** (1 / length(batch, i, k)) * a


def dppo(batch: Batch, i: int, k: int, a: float) -> torch.Tensor:
    """prime-rl's default loss: dppo_mask_low and _high 0.2, adv_tau 1, kl_tau 1e-3."""
    total = 0.0
    for at in batch.tokens(i, k):
        r, change = batch.ratio(at), math.exp(batch.logp[at].item()) - math.exp(batch.old[at].item())
        invalid = change > 0.2 if a > 0 else change < -0.2
        total = total + (0.0 if invalid else a) * r - 1e-3 * torch.log(r) ** 2
    return total


def log_prob(batch: Batch, i: int, k: int, a: float) -> torch.Tensor:
    """A log pi(y)."""
    return a * sum(batch.logp[at] for at in batch.tokens(i, k))


def k2(z: torch.Tensor) -> torch.Tensor:
    return z**2 / 2


def k3(z: torch.Tensor) -> torch.Tensor:
    return torch.exp(z) - z - 1


def centred(i: int, k: int) -> float:
    return (RIGHT[i, k] - RIGHT[i].mean()).item()


def standardised(i: int, k: int) -> float:
    return centred(i, k) / (math.sqrt(sum(centred(i, j) ** 2 for j in range(G)) / (G - 1)) + 1e-4)


def of_batch(i: int, k: int) -> float:
    """Centred by question, divided by the std of the batch."""
    return centred(i, k) / (math.sqrt(sum(centred(*at) ** 2 for at in outputs()) / (P * G - 1)) + 1e-8)


def leave_one_out(i: int, k: int) -> float:
    """R_k - mean of the others."""
    return (RIGHT[i, k] - (RIGHT[i].sum() - RIGHT[i, k]) / (G - 1)).item()


def by_pass_rate(i: int, k: int) -> float:
    return centred(i, k) / RIGHT[i].mean().item()


def difficult(i: int, k: int) -> float:
    """MAD, weights N softmax(-accuracy / T) over informative questions."""
    if i == 0:
        return 0.0
    accuracies = [RIGHT[j].mean().item() for j in range(P)]
    weight = 2 * math.exp(-accuracies[i] / 2.0) / sum(math.exp(-one / 2.0) for one in accuracies[1:])
    return weight * centred(i, k) / ((RIGHT[i] - accuracies[i]).abs().mean().item() + 1e-4)


def tokens(batch: Batch, i: int, k: int) -> int:
    """A denominator over the whole batch."""
    return int(batch.mask.sum())


def informative_tokens(batch: Batch, i: int, k: int) -> int:
    return sum(length(batch, i, k) for i, k in outputs() if i > 0)


def sequences(batch: Batch, i: int, k: int) -> int:
    """The mean over completions of the sum over tokens."""
    return P * G


def means(batch: Batch, i: int, k: int) -> int:
    """The mean over completions of the mean over tokens."""
    return P * G * length(batch, i, k)


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
def test_an_algorithm_is_its_papers_formula(batch: Batch, name: str) -> None:
    advantage, term, divisor, kl, beta, *overrides = PAPERS[name]
    if name in ("gspo", "luspo"):  # ratios near 1, as GSPO's narrow bounds want them
        batch = replace(batch, old=batch.logp.detach() + 0.01 * (batch.old - batch.logp.detach()))
    objective = torch.zeros((), dtype=torch.float64)
    for i, k in outputs():
        gain = term(batch, i, k, advantage(i, k))
        if kl:
            gain = gain - beta * sum(kl(batch.ref[at] - batch.logp[at]) for at in batch.tokens(i, k))
        objective = objective + gain / divisor(batch, i, k)
    assert_same(batch, objective, f"algorithm={name}", *overrides)


def test_every_named_algorithm_is_here() -> None:
    """A new `conf/algorithm/NAME.yaml` needs its paper's formula in this file."""
    names = {path.stem for path in (Path(conf_dir()) / "algorithm").glob("*.yaml")}
    assert names == PAPERS.keys() | {"opd", "sft"}  # distillation and supervised training have their own tests
