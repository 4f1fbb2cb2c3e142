"""Batches for formulas that are written out with loops in float64, and the comparison with an algorithm's loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from composed import built

P, G, T = 3, 4, 6
NAN = float("nan")


@dataclass(frozen=True)
class Batch:
    """Rewards [P, G]; log-probs and entropies [P x G, T]; mask of output tokens [P x G, T]."""

    rewards: torch.Tensor
    logp: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    sampler: torch.Tensor
    mask: torch.Tensor

    def tokens(self, i: int, k: int) -> list[tuple[int, int]]:
        """The positions of the tokens of output k of question i."""
        row = i * G + k
        return [(row, t) for t in range(T) if self.mask[row, t]]

    def ratio(self, at: tuple[int, int]) -> torch.Tensor:
        """pi / pi_old."""
        return torch.exp(self.logp[at]) / torch.exp(self.old[at])


def make_batch(seed: int, noise: float = 0.3) -> Batch:
    """Ragged outputs with gaps (messages of an environment); the first question's rewards are constant."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, T + 1, (P * G, 1), generator=g)
    mask = (torch.arange(T) < lengths) & (torch.rand(P * G, T, generator=g) < 0.8)
    mask[:, 0] |= ~mask.any(1)  # a paper's output has a token
    rewards = torch.randint(0, 3, (P, G), generator=g).double() / 2
    rewards[0] = 0.7
    rewards[1:, :2] = torch.tensor([0.0, 1.0])
    logp = -normal(P * G, T).abs()

    def outside_nan(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(~mask, NAN)

    return Batch(
        rewards=rewards,
        logp=outside_nan(logp).requires_grad_(),
        entropy=outside_nan(normal(P * G, T).abs()).requires_grad_(),
        old=outside_nan(logp + noise * normal(P * G, T)),
        ref=outside_nan(logp + noise * normal(P * G, T)),
        sampler=outside_nan(logp + noise * normal(P * G, T)),
        mask=mask.long(),
    )


def smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a if a.item() <= b.item() else b


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a if a.item() >= b.item() else b


def clip(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """x clipped to low and high, without gradient at the bounds."""
    if x.item() < low:
        return torch.tensor(low, dtype=torch.float64)
    return torch.tensor(high, dtype=torch.float64) if x.item() > high else x


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def outputs() -> Iterator[tuple[int, int]]:
    return ((i, k) for i in range(P) for k in range(G))


def assert_same(batch: Batch, objective: torch.Tensor, *overrides: str, weights: torch.Tensor | None = None) -> None:
    """The loss is minus the objective, and so are their gradients, to a relative 1e-10.

    weights: advantages [P x G] to use instead of those of the algorithm.
    """
    algorithm = built(*overrides)
    advantages = algorithm.advantages({"r": batch.rewards}).reshape(-1) if weights is None else weights
    loss, _ = algorithm.loss(
        batch.logp,
        batch.old,
        advantages,
        batch.mask,
        group_ids=torch.arange(P).repeat_interleave(G),
        ref_logp=batch.ref,
        rollout_logp=batch.sampler,
        entropy=batch.entropy,
    )
    leaves = [batch.logp, batch.entropy]
    ours = torch.cat(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    theirs = torch.cat(torch.autograd.grad(-objective, leaves, allow_unused=True, materialize_grads=True))
    assert (theirs.abs() > 1e-6).any(), "a test of nothing"
    assert (loss + objective).abs() <= 1e-10 * objective.abs()
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    assert ((ours == 0) == (theirs == 0)).all()
