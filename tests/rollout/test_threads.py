"""One thread samples if a token's matrix products are too small to share."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from grpocli.rollout import sampler, sampling
from grpocli.rollout.transformers_engine import TransformersEngine
from grpocli.types import Request, Sampling


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def sampled_with(model, rows: int, monkeypatch) -> int:
    """The number of threads that the engine uses to sample `rows` rows."""
    seen = []
    real = sampler.sample

    def sample(*args, **others):
        seen.append(torch.get_num_threads())
        return real(*args, **others)

    monkeypatch.setattr(sampler, "sample", sample)
    policy = SimpleNamespace(model=model, sampling_mode=nullcontext)
    TransformersEngine(policy, [1], 256, None).generate([Request([2, 3], rows, 0)], Sampling(2))
    assert torch.get_num_threads() == 2, "the number of threads is restored"
    return seen[0]


def test_one_thread_samples_few_rows_of_a_small_model(little_model, monkeypatch) -> None:
    parameters = sum(p.numel() for p in little_model.parameters())
    monkeypatch.setattr(sampling, "SINGLE_THREAD_LIMIT", 8 * parameters // 2)  # products of two layers
    assert sampled_with(little_model, 8, monkeypatch) == 1
    assert sampled_with(little_model, 9, monkeypatch) == 2
