"""The expected gradients of the KL estimators, by enumeration of all tokens of a small vocabulary."""

from __future__ import annotations

import pytest
import torch

from grpocli.algorithm.kl import K1, K2, K3, Estimator, Reverse


@pytest.mark.parametrize(
    ("part", "zero", "exact"),
    [
        (K1(), True, False),
        (K1(on_policy=True), False, True),
        (K2(), False, True),
        (K3(), False, False),
        (K3(on_policy=True), False, True),
        (Reverse(), False, True),
    ],
)
def test_the_expected_gradient_on_policy(part: Estimator, zero: bool, exact: bool) -> None:
    torch.manual_seed(0)
    logits_V = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref_V = logits_V.detach() + 0.5 * torch.randn(5, dtype=torch.float64)
    logp_V, ref_logp_V = logits_V.log_softmax(0), ref_V.log_softmax(0)
    (kl,) = torch.autograd.grad((logp_V.exp() * (logp_V - ref_logp_V)).sum(), logits_V, retain_graph=True)
    old_V = logp_V.detach()
    (found,) = torch.autograd.grad((old_V.exp() * part(logp_V, old_V, ref_logp_V)).sum(), logits_V)
    assert (found.abs().max() < 1e-12) == zero
    assert torch.allclose(found, kl) == exact
