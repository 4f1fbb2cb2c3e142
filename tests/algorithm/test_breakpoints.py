"""Formulas at the points where they change branches, and just on either side."""

from __future__ import annotations

import math

import pytest
import torch
from composed import built
from hypothesis import given
from hypothesis import strategies as st

from grpocli.algorithm.objective import Cispo, Clip
from grpocli.errors import ConfigError
from grpocli.rewards.length import Overlong
from grpocli.rewards.reward import Sample

NEAR = 1e-6


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


def test_dual_bounds_the_loss_at_c_and_delta_at_delta() -> None:
    for r in (3.0, 3.5, 10.0, 1e6):
        assert at(Clip(dual=3.0), r, -2.0)[0] == pytest.approx(3.0 * 2.0)
        assert at(Clip(delta=3.0), r, -2.0)[0] == pytest.approx(3.0 * 2.0)
        assert at(Clip(), r, -2.0)[0] == pytest.approx(r * 2.0)


@pytest.mark.parametrize("dual", [1.0, 0.5, -1.0])
def test_dual_must_be_above_1(dual: float) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.objective\.dual={dual}: must be above 1"):
        Clip(dual=dual)


@pytest.mark.parametrize("delta", [1.2, 1.0])
def test_delta_must_be_above_the_clip(delta: float) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.objective\.delta={delta}: must be above 1 \+ "):
        Clip(high=0.2, delta=delta)
    Clip(high=0.2, delta=1.21)


def test_cispo_keeps_the_gradient_and_bounds_the_weight() -> None:
    for r, weight in ((2.5 - NEAR, 2.5 - NEAR), (2.5 + NEAR, 2.5), (100.0, 2.5)):
        assert at(Cispo(high=1.5), r, 2.0)[1] == pytest.approx(-weight * 2.0, rel=1e-9)


def overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO, equation 13."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


def punished(lengths: list[int], limit: int, buffer: int) -> list[object]:
    samples = [Sample("p", "x", "x", {}, [7] * n, limit, truncated=False) for n in lengths]
    return list(Overlong(max_tokens=limit, buffer_tokens=buffer)(samples))


def test_overlong_at_its_breakpoints() -> None:
    """With the paper's numbers: 0 up to 16384, linear to -1 at 20480, -1 beyond."""
    lengths = [0, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 10**5]
    expected = [0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1]
    assert punished(lengths, 20480, 4096) == expected


@given(limit=st.integers(1, 60), data=st.data())
def test_overlong_is_equation_13_at_every_length(limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, limit))
    lengths = list(range(limit + 3))
    assert punished(lengths, limit, buffer) == pytest.approx([overlong(n, limit, buffer) for n in lengths])


@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
@pytest.mark.parametrize("gap", [95.0, -95.0])
def test_ratios_that_overflow_do_not_give_nan(objective: str, gap: float) -> None:
    algorithm = built("algorithm=dapo", f"algorithm/objective={objective}")
    logp = torch.full((3, 2), -1.0, requires_grad=True)
    loss, metrics = algorithm.loss(logp, logp.detach() - gap, torch.tensor([1.0, 0.0, -1.0]), torch.ones(3, 2))
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logp)[0].isfinite().all()
    assert all(metrics[name].isfinite() for name in metrics if name.startswith("clip_ratio"))
