"""In-process sampling: a row depends only on its own seed. test_repetition.py compares it with the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpocli.progress import Watch
from grpocli.rollout import sampling
from grpocli.rollout.sampler import sample
from grpocli.rollout.sampling import draw, sampling_logits
from grpocli.types import Completion, Request, Sampling

PROMPTS = [[2, 5, 6], [2, 7, 8, 9, 10, 11], [2, 12]]
FREE = Sampling(max_tokens=12)


def run(model, sampling: Sampling, seeds: list[int], n: int = 3) -> list[list[Completion]]:
    requests = [Request(p, n, s) for p, s in zip(PROMPTS, seeds, strict=True)]
    return sample(model, requests, sampling, stop_token_ids=[1], version=7)


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(little_model) -> None:
    groups = run(little_model, FREE, [1, 2, 3], n=16)
    done = [c for group in groups for c in group]
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for c in done:
        assert (c.token_ids[-1] == 1) == (c.finish_reason == "stop")
        assert 1 not in c.token_ids[:-1]
        assert len(c.logprobs) == len(c.token_ids) <= 12
        assert c.version == 7
        assert c.truncated == (c.finish_reason == "length")


def test_tokens_depend_on_the_seed_and_not_on_the_batch(little_model) -> None:
    together = run(little_model, FREE, [1, 2, 3])
    for i, prompt in enumerate(PROMPTS):
        (alone,) = sample(little_model, [Request(prompt, 3, i + 1)], FREE, [1], 7)
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[i]]
    other = run(little_model, FREE, [4, 5, 6])
    assert [c.token_ids for g in other for c in g] != [c.token_ids for g in together for c in g]
    assert len({tuple(c.token_ids) for c in together[0]}) > 1


@pytest.mark.parametrize("tokens", [1, 64, 65, 50_257])
@pytest.mark.parametrize("spread", [0.0, 30.0])
def test_draw_inverts_the_whole_cumulative_distribution(tokens: int, spread: float) -> None:
    """Where blocks change the token, the random number is on the edge between two tokens, up to rounding."""
    generator = torch.Generator().manual_seed(tokens)
    probs = (spread * torch.randn(200, tokens, generator=generator)).softmax(-1)
    probs[:, 1::7] = 0
    uniform = torch.rand(200, 1, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    found = draw(probs, uniform.squeeze(1)).unsqueeze(1)
    exact = probs.double() / probs.double().sum(-1, keepdim=True)
    after = exact.cumsum(-1).gather(1, found)
    assert (probs.gather(1, found) > 0).all()
    assert (after >= uniform - 1e-6).all()
    assert (after - exact.gather(1, found) <= uniform + 1e-6).all()


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [({"top_k": 2}, [0, 1]), ({"top_p": 0.5}, [0]), ({"min_p": 0.3}, [0, 1]), ({"top_k": 3, "top_p": 0.7}, [0, 1])],
)
def test_truncation_keeps_the_likeliest_tokens(truncation: dict[str, Any], kept: list[int]) -> None:
    logits, sampling = torch.tensor([[0.5, 0.3, 0.14, 0.06]]).log(), Sampling(1, **truncation)
    out = sampling_logits(logits, sampling)
    assert (~out.isinf()).nonzero()[:, 1].tolist() == kept
    forced = sampling_logits(logits, sampling, keep_N=torch.tensor([3]))
    assert not forced[0, 3].isinf()


def test_a_request_may_have_a_lower_limit(little_model) -> None:
    """Its tokens are a prefix of the longer completion, whatever else is in the batch."""
    sampling = Sampling(8)
    (whole,) = sample(little_model, [Request(PROMPTS[0], 3, 7)], sampling, [], 0)
    beside = [Request(PROMPTS[1], 2, 1), Request(PROMPTS[0], 1, 2, max_tokens=99)]
    short, *others = sample(little_model, [Request(PROMPTS[0], 3, 7, max_tokens=3), *beside], sampling, [], 0)
    assert [done.token_ids for done in short] == [done.token_ids[:3] for done in whole]
    assert {done.finish_reason for done in short} == {"length"}
    assert [len(done.token_ids) for group in others for done in group] == [8, 8, 8]


def test_a_cancelled_watch_ends_completions_within_a_token(little_model) -> None:
    told = [""]
    watch = Watch(
        lambda done, total, unit, detail="": told.append(detail), lambda: told[-1].startswith("token 3 of at most 12")
    )
    requests = [Request(p, 3, s) for s, p in enumerate(PROMPTS)]
    cut = sample(little_model, requests, FREE, [1], 7, watch=watch)
    whole = sample(little_model, requests, FREE, [1], 7)
    for done, expected in zip((c for g in cut for c in g), (c for g in whole for c in g), strict=True):
        assert done.token_ids == expected.token_ids[:3]


def test_one_thread_samples_few_rows_of_a_small_model(little_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size and not by time, so that a resumed run samples the same tokens."""
    parameters = sum(p.numel() for p in little_model.parameters())
    monkeypatch.setattr(sampling, "SINGLE_THREAD_LIMIT", 8 * parameters // 2)  # products of two layers
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows, threads in ((8, 1), (9, 2)):
            with sampling.single_thread_if_small(little_model, rows):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
