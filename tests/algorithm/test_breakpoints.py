"""Formulas where they change branches, just on either side, and at the limits of floating-point numbers."""

from __future__ import annotations

import math

import pytest
import torch
from composed import built

from grpocli.algorithm.advantage import constant_P1
from grpocli.algorithm.kl import K1, K2, K3
from grpocli.algorithm.objective import Cispo, Clip

NEAR = 1e-6
NAN = float("nan")


def at(objective: Clip | Cispo, ratio: float, advantage: float) -> tuple[float, float]:
    """The loss of one token, and its gradient with respect to log pi."""
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    loss = objective(logp, zero, torch.tensor([advantage], dtype=torch.float64), mask)[0].sum()
    return loss.item(), torch.autograd.grad(loss, logp)[0].item()


@pytest.mark.parametrize(
    ("objective", "ratio", "advantage", "below", "above"),
    [
        # -min(r A, clip(r) A): the gradient ends at 1 + high for A > 0, and begins at 1 - low for A < 0
        (Clip(high=0.28), 1.28, 1.5, True, False),
        (Clip(low=0.2), 0.8, 1.5, True, True),
        (Clip(high=0.28), 1.28, -1.5, True, True),
        (Clip(low=0.2), 0.8, -1.5, False, True),
        # dual: for A < 0, from r = c on
        (Clip(dual=3.0), 3.0, -1.5, True, False),
        (Clip(dual=3.0), 3.0, 1.5, False, False),
        (Clip(dual=3.0, high=9.0), 3.0, 1.5, True, True),
        (Clip(dual=1.1), 1.1, -1.5, True, False),
        # delta: for A < 0, from r = delta on; for A > 0 the clip comes first
        (Clip(delta=4.0), 4.0, -1.5, True, False),
        (Clip(delta=4.0), 4.0, 1.5, False, False),
        (Clip(), 4.0, -1.5, True, True),
        # with both, the lower bound acts
        (Clip(dual=3.0, delta=4.0), 3.0, -1.5, True, False),
        (Clip(dual=5.0, delta=4.0), 4.0, -1.5, True, False),
    ],
)
def test_the_gradient_ends_at_the_bound(
    objective: Clip, ratio: float, advantage: float, below: bool, above: bool
) -> None:
    """The gradient is -r A on one side of the bound and 0 on the other; the loss is continuous."""
    for side, has_gradient in ((-NEAR, below), (NEAR, above)):
        r = ratio + side
        loss, gradient = at(objective, r, advantage)
        assert gradient == pytest.approx(-r * advantage if has_gradient else 0.0)
        assert loss == pytest.approx(at(objective, ratio, advantage)[0], abs=2 * NEAR * abs(advantage))
        if has_gradient:
            assert loss == pytest.approx(-r * advantage)


def test_cispo_keeps_the_gradient_and_bounds_the_weight() -> None:
    for r, weight in ((2.5 - NEAR, 2.5 - NEAR), (2.5 + NEAR, 2.5), (100.0, 2.5)):
        assert at(Cispo(high=1.5), r, 2.0)[1] == pytest.approx(-weight * 2.0, rel=1e-9)


@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
@pytest.mark.parametrize("gap", [95.0, -95.0])
def test_ratios_that_overflow_do_not_give_nan(objective: str, gap: float) -> None:
    algorithm = built("algorithm=dapo", f"algorithm/objective={objective}")
    logp = torch.full((3, 2), -1.0, requires_grad=True)
    loss, metrics = algorithm.loss(logp, logp.detach() - gap, torch.tensor([1.0, 0.0, -1.0]), torch.ones(3, 2))
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logp)[0].isfinite().all()
    assert all(metrics[name].isfinite() for name in metrics if name.startswith("clip_ratio"))


def test_scores_that_differ_by_rounding_are_equal() -> None:
    scores = torch.tensor([[0.1 + 0.2, 0.3 + 0.0], [0.3, 0.3 + 1e-6]], dtype=torch.float64)
    assert constant_P1(scores).squeeze(1).tolist() == [True, False]
    algorithm = built("algorithm=dapo", "algorithm.advantage.eps=0")
    assert algorithm.kept({"r": scores}).tolist() == [False, True]
    assert algorithm.advantages({"r": scores})[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
@pytest.mark.parametrize("combine", ["sum", "normalize_then_sum"])
def test_infinite_rewards_are_refused(combine: str, infinite: float) -> None:
    """The mean of infinite scores is NaN, which would pass for a missing score."""
    algorithm = built("algorithm=grpo", f"algorithm.combine={combine}")
    rewards = {"style": torch.zeros(2, 2), "math": torch.tensor([[0.0, 1.0], [NAN, infinite]])}
    for method in (algorithm.advantages, algorithm.kept, algorithm.scores):
        with pytest.raises(ValueError, match=r"reward 'math' is infinite at \[1, 1\]"):
            method(rewards)
    with pytest.raises(ValueError, match=r"weights\['math'\] is inf; give a finite number"):
        algorithm.advantages({"math": torch.zeros(1, 2)}, {"math": math.inf})


def test_k3_is_bounded_and_unchanged_below_its_bound() -> None:
    """exp(89) is infinite in float32. Below the bound, value and gradient are bit-identical to the plain formula."""
    x = torch.linspace(-10.9, 2.6, 1001)
    for part in (K3(), K3(on_policy=True)):
        logp, plain = torch.zeros_like(x).requires_grad_(), torch.zeros_like(x).requires_grad_()
        old = torch.full_like(x, -0.1)
        ours, weight = part(logp, old, x), (plain - old).exp() if part.on_policy else 1.0
        formula = ((x - plain).exp() - (x - plain) - 1) * weight
        assert ours.equal(formula)
        assert torch.autograd.grad(ours.sum(), logp)[0].equal(torch.autograd.grad(formula.sum(), plain)[0])
    far = torch.tensor([2.7, 21.0, 90.0, 1e6, -11.1, -90.0, -1e6])
    logp = torch.zeros_like(far).requires_grad_()
    values = K3()(logp, logp.detach(), far)
    assert values.tolist() == [10.0] * len(far)
    assert torch.autograd.grad(values.sum(), logp)[0].tolist() == [0.0] * len(far)


@pytest.mark.parametrize("made", [K1, K2, K3])
def test_an_on_policy_kl_of_a_far_token_is_finite(made: type[K1] | type[K2] | type[K3]) -> None:
    logp = torch.tensor([0.0], requires_grad=True)
    value = made(on_policy=True)(logp, torch.tensor([-120.0]), torch.tensor([-1.0]))
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_rewards_that_cancel_are_zero() -> None:
    algorithm = built("algorithm=dapo", "algorithm.advantage.eps=0", "algorithm.keep.reward=score")
    rewards = {
        name: torch.tensor([[value, 0.0]], dtype=torch.float64) for name, value in (("a", 0.1), ("b", 0.2), ("c", -0.3))
    }
    assert algorithm.kept(rewards).tolist() == [False]
    assert algorithm.advantages(rewards).tolist() == [[0.0, 0.0]]
