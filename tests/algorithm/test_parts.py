"""Each part, with numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from composed import built

from grpocli.algorithm.advantage import BatchStd, Center, LeaveOneOut, Mad, Std
from grpocli.algorithm.correction import SequenceMask, SequenceTruncate, TokenMask, TokenTruncate
from grpocli.algorithm.keep import All, Dynamic
from grpocli.algorithm.kl import K1, K2, K3
from grpocli.algorithm.objective import Cispo, Clip, Sapo
from grpocli.algorithm.question_weight import Difficulty
from grpocli.algorithm.statistics import constant_P1
from grpocli.errors import ConfigError

NAN = float("nan")


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (Std(eps=0.0), [-0.5, -0.5, -0.5, 1.5]),
        (Center(), [-0.25, -0.25, -0.25, 0.75]),
        (Mad(eps=0.0), [-2 / 3, -2 / 3, -2 / 3, 2.0]),
        (LeaveOneOut(), [-1 / 3, -1 / 3, -1 / 3, 1.0]),
        (BatchStd(eps=0.0), [-0.5, -0.5, -0.5, 1.5]),
    ],
)
def test_advantages(advantage: Std, expected: list[float]) -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(advantage(scores), torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("advantage", [Std(), Center(), Mad(), LeaveOneOut(), Std(eps=0.0)])
def test_a_missing_score_is_left_out(advantage: Std) -> None:
    with_gap = advantage(torch.tensor([[0.0, 1.0, NAN], [NAN, NAN, NAN], [2.0, NAN, NAN]]))
    assert with_gap[0, 2] == 0
    assert with_gap[1:].eq(0).all()
    torch.testing.assert_close(with_gap[:1, :2], advantage(torch.tensor([[0.0, 1.0]])))


def test_difficulty_weights_sum_to_the_informative_questions() -> None:
    scores = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.5], [0.0, 1.0]])
    accuracy = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [NAN, NAN]])
    weights = Difficulty(temperature=2.0)(scores, accuracy)
    assert weights[1] == 1
    assert weights[[0, 2, 3]].sum().item() == pytest.approx(3)
    torch.testing.assert_close(weights[0] / weights[2], torch.tensor(0.25).exp())  # 0 and unknown count as 1
    assert weights[2] == weights[3]


def test_dynamic_keeps_groups_that_are_not_constant() -> None:
    scores = torch.tensor([[0.0, 0.0], [1.0, 0.0], [NAN, NAN], [1.0, NAN], [0.1, 0.1]])
    assert Dynamic()(scores).tolist() == [False, True, False, False, False]
    assert All()(scores).all()


def objective_at(objective: Clip | Cispo | Sapo, ratio: float, advantage: float) -> tuple[float, float]:
    logp = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    zero, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    loss = objective(logp, zero, torch.tensor([advantage], dtype=torch.float64), mask)[0].sum()
    return loss.item(), torch.autograd.grad(loss, logp)[0].item()


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "loss", "gradient"),
    [
        ({}, 1.1, 2.0, -2.2, -2.2),
        ({}, 1.5, 2.0, -2.4, 0.0),
        ({}, 0.5, 2.0, -1.0, -1.0),
        ({}, 0.5, -2.0, 1.6, 0.0),
        ({}, 5.0, -2.0, 10.0, 10.0),
        ({"high": 0.28}, 1.25, 1.0, -1.25, -1.25),
        ({"dual": 3.0}, 5.0, -2.0, 6.0, 0.0),
        ({"dual": 3.0}, 2.5, -2.0, 5.0, 5.0),
        ({"dual": 3.0}, 5.0, 2.0, -2.4, 0.0),
        ({"delta": 4.0}, 5.0, -2.0, 8.0, 0.0),
        ({"delta": 4.0}, 3.0, -2.0, 6.0, 6.0),
    ],
)
def test_clip(options: dict[str, float], ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert objective_at(Clip(**options), ratio, advantage) == pytest.approx((loss, gradient))


def test_sequence_ratio_is_the_geometric_mean() -> None:
    logp = torch.tensor([[0.1, 0.3, 9.0]])
    mask = torch.tensor([[1, 1, 0]])
    loss, _ = Clip(level="sequence", high=1.0)(logp * mask, torch.zeros(1, 3), torch.tensor([1.0]), mask)
    torch.testing.assert_close(loss[:, :2], torch.full((1, 2), -torch.tensor(0.2).exp().item()))


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    assert objective_at(Cispo(high=1.0), 5.0, 1.0)[1] == pytest.approx(-2.0)


def test_sapo_is_the_plain_gradient_at_ratio_one() -> None:
    assert objective_at(Sapo(), 1.0, 1.0)[1] == pytest.approx(-1.0)


def test_kl_estimators() -> None:
    logp, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert K1()(logp, logp, ref).item() == pytest.approx(0.5)
    assert K2()(logp, logp, ref).item() == pytest.approx(0.125)
    assert K3()(logp, logp, ref).item() == pytest.approx(torch.tensor(-0.5).exp().item() - 0.5)
    old = torch.tensor([[-2.0]])
    weighted = K1(on_policy=True)(logp, old, ref).item()
    assert weighted == pytest.approx(0.5 * torch.tensor(1.0).exp().item())


def test_corrections() -> None:
    trainer = torch.tensor([[3.0, 1.0, 0.25]]).log()
    sampler, mask = torch.zeros(1, 3), torch.ones(1, 3)
    torch.testing.assert_close(TokenTruncate(min=0.5)(trainer, sampler, mask), torch.tensor([[2.0, 1.0, 0.5]]))
    torch.testing.assert_close(TokenMask(min=0.5)(trainer, sampler, mask), torch.tensor([[0.0, 1.0, 0.0]]))
    mean = torch.tensor([[0.75]]).pow(1 / 3)
    torch.testing.assert_close(SequenceTruncate()(trainer, sampler, mask), mean)
    assert SequenceMask(min=0.95)(trainer, sampler, mask).item() == 0


def test_rewards_are_weighted_and_may_not_apply() -> None:
    algorithm = built("algorithm=drgrpo")
    rewards = {
        "a": torch.tensor([[1.0, 0.0, NAN]]),
        "b": torch.tensor([[NAN, 1.0, NAN]]),
    }
    scores = algorithm.scores(rewards, {"b": 2.0})
    assert scores[0, :2].tolist() == [1.0, 2.0]
    assert scores[0, 2].isnan()
    assert algorithm.advantages(rewards, {"b": 2.0})[0].tolist() == [-0.5, 0.5, 0.0]


def test_normalize_then_sum_makes_rewards_of_any_scale_equal() -> None:
    algorithm = built("algorithm=grpo", "algorithm.combine=normalize_then_sum", "algorithm.advantage.eps=0")
    a = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    small = algorithm.advantages({"a": a, "b": 1.0 - a})
    assert small.abs().max() < 1e-9
    torch.testing.assert_close(
        algorithm.advantages({"a": a, "b": 1000 * a}), algorithm.advantages({"a": a, "b": a}), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.objective.dual=0.5", "algorithm.objective.dual=0.5"),
        ("algorithm.combine=add", "algorithm.combine=add: choose one of sum, normalize_then_sum"),
        ("algorithm.objective.level=tokens", 'did you mean "token"?'),
        ("algorithm/advantage=stdd", 'did you mean "std"?'),
        ("algorithm.kl.betta=1", 'did you mean "algorithm.kl.beta"?'),
    ],
)
def test_bad_values_name_their_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        built("algorithm=grpo", override)
    assert message in str(error.value)


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
        with pytest.raises(
            ValueError, match=rf"reward 'math' is {infinite} for completion 1 of group 1; give a finite"
        ):
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
        assert not part.clamped(logp, x).any()
    far = torch.tensor([2.7, 21.0, 90.0, 1e6, -11.1, -90.0, -1e6])
    logp = torch.zeros_like(far).requires_grad_()
    values = K3()(logp, logp.detach(), far)
    assert values.tolist() == [10.0] * len(far)
    assert torch.autograd.grad(values.sum(), logp)[0].tolist() == [0.0] * len(far)
    assert K3().clamped(logp, far).all()


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
