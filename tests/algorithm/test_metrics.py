"""The metrics of a loss, computed by hand."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from composed import built

from grpocli.algorithm.metrics import combined


def test_metrics_of_the_gap_between_sampler_and_trainer() -> None:
    """As NeMo RL's GRPO guide defines them, over tokens in the loss; the third token is masked."""
    now, old, sampler = (torch.tensor([p]).log() for p in ([0.5, 0.2, 0.9], [0.4, 0.25, 0.9], [0.8, 0.1, 0.01]))
    mask = torch.tensor([[1, 1, 0]])
    _, metrics = built("algorithm=dapo").loss(now, old, torch.ones(1), mask, rollout_logp=sampler)
    assert metrics["token_mult_prob_error"].item() == pytest.approx((0.8 / 0.4 + 0.25 / 0.1) / 2)
    assert metrics["sampling_importance_ratio"].item() == pytest.approx((0.4 / 0.8 + 0.25 / 0.1) / 2)
    entropy = -(0.5 / 0.8 * math.log(0.5) + 0.2 / 0.1 * math.log(0.2)) / 2
    assert metrics["approx_entropy"].item() == pytest.approx(entropy)


def test_without_the_samplers_log_probs_the_gap_metrics_are_missing() -> None:
    now, old, mask = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1)
    loss = functools.partial(built("algorithm=dapo").loss, now, old, torch.ones(1), mask)
    (one, metrics), (other, measured) = loss(), loss(rollout_logp=old)
    assert one == other
    gap = {"token_mult_prob_error", "sampling_importance_ratio"}
    assert measured.keys() - metrics.keys() == gap | {"gen_kl_error", "policy_kl_error", "js_divergence_error"}
    assert metrics["approx_entropy"] == measured["approx_entropy"]


def test_divergences_of_sampler_and_trainer() -> None:
    """As NeMo RL's loss computes them (kl_type k3, no clamps), p the trainer's and q the sampler's probability."""
    p, q = [0.4, 0.25, 0.9], [0.8, 0.1, 0.01]
    old, sampler = torch.tensor([p]).log(), torch.tensor([q]).log()
    _, metrics = built("algorithm=dapo").loss(old, old, torch.ones(1), torch.tensor([[1, 1, 0]]), rollout_logp=sampler)

    def k3(logprobs: float, logprobs_reference: float) -> float:
        logr = logprobs_reference - logprobs
        return math.exp(logr) - 1 - logr

    gen, policy, js = [], [], []
    for prev, generation in zip(map(math.log, p[:2]), map(math.log, q[:2]), strict=True):
        gen.append(k3(generation, prev))  # KL(P_gen || P_train)
        policy.append(k3(prev, generation))  # KL(P_train || P_gen)
        log_mixture = math.log(0.5 * math.exp(prev) + 0.5 * math.exp(generation))
        kl_prev_to_mixture = math.exp(prev - log_mixture) - (prev - log_mixture) - 1
        kl_gen_to_mixture = math.exp(generation - log_mixture) - (generation - log_mixture) - 1
        js.append(0.5 * kl_prev_to_mixture + 0.5 * kl_gen_to_mixture)
    assert metrics["gen_kl_error"].item() == pytest.approx(sum(gen) / 2)
    assert metrics["policy_kl_error"].item() == pytest.approx(sum(policy) / 2)
    assert metrics["js_divergence_error"].item() == pytest.approx(sum(js) / 2)
    one, near = torch.tensor([[-1.0]]), torch.tensor([[-1.0 - 2**-12]])  # not lost in rounding
    _, metrics = built("algorithm=dapo").loss(one, one, torch.ones(1), torch.ones(1, 1), rollout_logp=near)
    assert metrics["gen_kl_error"].item() == pytest.approx(2**-25, rel=1e-3)


def test_extremes_of_clipping_are_over_the_parts_of_an_update() -> None:
    """TRL: the minimum over devices of (is_low * mask).sum() / mask.sum(), and the maximum for is_high."""
    ratios = torch.tensor([[0.7, 0.7, 1.0], [0.7, 1.0, 1.0], [1.5, 1.5, 1.0], [1.0, 1.5, 1.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]])
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0])
    algorithm = built("algorithm=dapo")
    totals = algorithm.totals(advantages, mask)
    low, high, devices = [], [], [[0], [1], [2, 3], [4]]
    for rows in devices:
        is_low = (ratios[rows] < 0.8) & (advantages[rows, None] < 0)
        is_high = (ratios[rows] > 1.28) & (advantages[rows, None] > 0)
        low.append(((is_low * mask[rows]).sum() / mask[rows].sum()).item())
        high.append(((is_high * mask[rows]).sum() / mask[rows].sum()).item())
    parts = [
        algorithm.loss(ratios[rows].log(), torch.zeros(len(rows), 3), advantages[rows], mask[rows], totals=totals)[1]
        for rows in devices
    ]
    found = {
        name: functools.reduce(functools.partial(combined, name), [part[name] for part in parts]) for name in parts[0]
    }
    assert found["clip_ratio/high_max"].item() == pytest.approx(max(high[:3]))  # the last has no tokens: NaN in TRL
    assert found["clip_ratio/low_min"].item() == pytest.approx(min(low[:3]))
    assert found["clip_ratio/low_mean"].item() == pytest.approx(3 / 11)
    (one,) = [part for rows, part in zip(devices, parts, strict=True) if rows == [0]]
    assert one["clip_ratio/low_min"].item() == pytest.approx(2 / 3)


def test_tokens_that_are_not_computed_are_not_clipped() -> None:
    """The smallest share is never above the mean, which counts these tokens."""
    algorithm = built("algorithm=dapo")
    rows, low = torch.zeros(1, 2), torch.tensor([[0.5, 0.5]]).log()
    totals = algorithm.totals(torch.tensor([-1.0, 0.0]), torch.ones(2, 2))
    for skipped, least in ((0, 1.0), (2, 0.0)):
        _, metrics = algorithm.loss(
            low, rows, torch.tensor([-1.0]), torch.ones(1, 2), totals=dataclasses.replace(totals, skipped=skipped)
        )
        assert metrics["clip_ratio/low_min"].item() == least
        assert metrics["clip_ratio/low_mean"].item() == 0.5


def test_clip_ratios() -> None:
    """Low: r < 1 - low and A < 0; high: r > 1 + high and A > 0. Five tokens, one of each kind and one masked."""
    ratios = torch.tensor([[0.7, 1.5, 1.0], [0.7, 1.5, 0.5]])
    advantages, mask = torch.tensor([1.0, -1.0]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    algorithm = built("algorithm=dapo")
    _, metrics = algorithm.loss(ratios.log(), torch.zeros(2, 3), advantages, mask)
    shares = {name: metrics[f"clip_ratio/{name}_mean"].item() for name in ("low", "high", "region")}
    assert shares == pytest.approx({"low": 1 / 5, "high": 1 / 5, "region": 2 / 5})


def test_the_kl_is_a_token_mean_of_the_estimator() -> None:
    algorithm = built("algorithm=grpo", "algorithm/kl=k2")
    logp, reference = torch.zeros(1, 3), torch.tensor([[0.5, 1.0, 9.0]])
    _, metrics = algorithm.loss(logp, logp, torch.ones(1), torch.tensor([[1, 1, 0]]), ref_logp=reference)
    assert metrics["kl"].item() == pytest.approx((0.125 + 0.5) / 2)
