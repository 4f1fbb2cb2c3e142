"""The metrics of a loss, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpocli import build_algorithm


def test_metrics_of_the_gap_between_sampler_and_trainer() -> None:
    """As NeMo RL's GRPO guide defines them, over tokens in the loss: the third, far off, is not in it."""
    now, old, sampler = (torch.tensor([p]).log() for p in ([0.5, 0.2, 0.9], [0.4, 0.25, 0.9], [0.8, 0.1, 0.01]))
    mask = torch.tensor([[1, 1, 0]])
    _, metrics = build_algorithm("algorithm=dapo").loss(now, old, torch.ones(1), mask, rollout_logp=sampler)
    assert metrics["token_mult_prob_error"].item() == pytest.approx((0.8 / 0.4 + 0.25 / 0.1) / 2)
    assert metrics["sampling_importance_ratio"].item() == pytest.approx((0.4 / 0.8 + 0.25 / 0.1) / 2)
    entropy = -(0.5 / 0.8 * math.log(0.5) + 0.2 / 0.1 * math.log(0.2)) / 2
    assert metrics["approx_entropy"].item() == pytest.approx(entropy)


def test_clip_ratios() -> None:
    """Low: r < 1 - low and A < 0; high: r > 1 + high and A > 0. Five tokens, one of each kind and one masked."""
    ratios = torch.tensor([[0.7, 1.5, 1.0], [0.7, 1.5, 0.5]])
    advantages, mask = torch.tensor([1.0, -1.0]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    algorithm = build_algorithm("algorithm=dapo")
    _, metrics = algorithm.loss(ratios.log(), torch.zeros(2, 3), advantages, mask)
    shares = {name: metrics[f"clip_ratio/{name}_mean"].item() for name in ("low", "high", "region")}
    assert shares == pytest.approx({"low": 1 / 5, "high": 1 / 5, "region": 2 / 5})


def test_clip_ratios_of_sequences_are_means_over_rows() -> None:
    ratios = torch.tensor([[2.0, 2.0], [2.0, 2.0], [0.5, 0.5], [1.0, 1.0]])
    algorithm = build_algorithm(
        "algorithm=drgrpo", "algorithm.objective.level=sequence", "algorithm.aggregate.length=2"
    )
    _, metrics = algorithm.loss(ratios.log(), torch.zeros(4, 2), torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.ones(4, 2))
    assert metrics["clip_ratio/high_mean"].item() == metrics["clip_ratio/low_mean"].item() == 0.25


def test_the_kl_is_a_token_mean_of_the_estimator() -> None:
    algorithm = build_algorithm("algorithm=grpo", "algorithm/kl=k2")
    logp, reference = torch.zeros(1, 3), torch.tensor([[0.5, 1.0, 9.0]])
    _, metrics = algorithm.loss(logp, logp, torch.ones(1), torch.tensor([[1, 1, 0]]), ref_logp=reference)
    assert metrics["kl"].item() == pytest.approx((0.125 + 0.5) / 2)
