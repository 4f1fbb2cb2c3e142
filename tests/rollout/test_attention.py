"""Sampling on a CPU computes attention in float32, whatever the model's dtype."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from grpocli.rollout import sampler
from grpocli.rollout.sampler import sample
from grpocli.rollout.transformers_engine import TransformersEngine
from grpocli.training.policy import Policy
from grpocli.types import Completion, Request, Sampling

REQUESTS = [Request([2, 5, 6], 2, 1), Request([2, 7, 8, 9, 10, 11], 3, 2)]
SAMPLING = Sampling(max_tokens=9)


@pytest.fixture
def grouped(little_model):
    """A copy of the model, which has two query heads for each key head."""
    return deepcopy(little_model)


def sampled(model, requests: list[Request] = REQUESTS) -> list[Completion]:
    return [one for group in sample(model, requests, SAMPLING, [1], 0) for one in group]


@pytest.mark.parametrize("requests", [REQUESTS, REQUESTS[:1]], ids=["padded", "no padding"])
def test_tokens_equal_those_of_sdpa(grouped, requests) -> None:
    plain = sampled(grouped, requests)
    with sampler.float32_attention(grouped):
        assert grouped.config._attn_implementation == sampler.SAMPLING_ATTENTION
        ours = sampled(grouped, requests)
    for one, other in zip(plain, ours, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-5, atol=1e-6)


def test_under_autocast_keys_queries_and_values_are_float32(grouped, monkeypatch) -> None:
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, *args, **how):
        out = real(query, key, value, *args, **how)
        if query.shape[2] == 1:
            seen.append((key.dtype, value.dtype, out.dtype))
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    policy = Policy(grouped, grouped, torch.bfloat16)
    engine = TransformersEngine(policy, [1], 256, None)
    engine.generate(REQUESTS, SAMPLING)
    assert grouped.config._attn_implementation == "sdpa", "after sampling, too"
    assert set(seen) == {(torch.float32,) * 3}
    assert len(seen) == 2 * (SAMPLING.max_tokens - 1), "every layer, every token but the first"
