"""Log-probs of the sampler and of the trainer are the model's under the sampling distribution, whose repetition penalty
is transformers'."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from grpocli.rollout.sampler import sample
from grpocli.rollout.sampling import sampling_logits
from grpocli.training import logprobs
from grpocli.training.logprobs import completion_scores
from grpocli.training.packing import MicroBatch
from grpocli.types import Completion, Request, Row, Sampling

PROMPTS = [[2, 5, 6], [2, 7, 8, 9, 10, 11], [12, 12]]  # repeated in completions; without the padding token 0
PENALISED = Sampling(12, temperature=0.9, repetition_penalty=1.8)
LIKED = replace(PENALISED, repetition_penalty=0.6)
CUT = replace(PENALISED, top_p=0.9, top_k=9, min_p=0.01)
PLAIN = replace(PENALISED, repetition_penalty=1.0)


def sampled(model, sampling: Sampling, n: int = 4) -> list[tuple[list[int], Completion]]:
    requests = [Request(p, n, i) for i, p in enumerate(PROMPTS)]
    groups = sample(model, requests, sampling, stop_token_ids=[1], version=0)
    return [(p, done) for p, group in zip(PROMPTS, groups, strict=True) for done in group]


def slowly(model, prompt: list[int], token_ids: list[int], sampling: Sampling) -> torch.Tensor:
    """Log-probs [T], one token at a time, with transformers' penalty."""
    processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    plain = replace(sampling, repetition_penalty=1.0)
    ids, logp = list(prompt), []
    for token in token_ids:
        logits = model(input_ids=torch.tensor([ids])).logits[:, -1].float()
        logits = processor(torch.tensor([sorted(set(ids))]), logits)  # repeated ids would have their gradient twice
        logp.append(sampling_logits(logits, plain, keep_N=torch.tensor([token])).log_softmax(-1)[0, token])
        ids.append(token)
    return torch.stack(logp)


def trained(model, done: list[tuple[list[int], Completion]], sampling: Sampling) -> torch.Tensor:
    """The trainer's log-probs [B, T] of padded rows."""
    rows = [Row(prompt, c.token_ids, [1] * len(c.token_ids), 1.0, 0, c.logprobs) for prompt, c in done]
    micro = MicroBatch.build(rows, torch.device("cpu"))
    assert (micro.layout.attention_mask == 0).any()
    return completion_scores(model, micro, sampling, nullcontext()).logp


@pytest.mark.parametrize("sampling", [PENALISED, LIKED, CUT, PLAIN, replace(CUT, repetition_penalty=1.0)])
@torch.no_grad()
def test_sampler_and_trainer_agree_with_transformers(little_model, sampling: Sampling, monkeypatch) -> None:
    done = sampled(little_model, sampling)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 40 * 7)  # splits within rows
    logp_BT = trained(little_model, done, sampling)
    unpenalised_BT = trained(little_model, done, replace(sampling, repetition_penalty=1.0))
    for i, (prompt, one) in enumerate(done):
        expected = slowly(little_model, prompt, one.token_ids, sampling)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logp_BT[i, : len(expected)], expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(logp_BT, unpenalised_BT, atol=1e-2) == (sampling.repetition_penalty == 1)


@torch.no_grad()
def test_padding_is_not_penalised(little_model) -> None:
    """The padding token is part of the vocabulary: both rows contain it, and only one has padding."""
    ids = {(6,): [0, 5], (6, 7, 8, 9): [9, 0, 5, 0, 3]}
    done = [(list(prompt), Completion(said, [0.0] * len(said), "length", 0)) for prompt, said in ids.items()]
    together = trained(little_model, done, PENALISED)
    for i, (prompt, one) in enumerate(done):
        expected = slowly(little_model, prompt, one.token_ids, PENALISED)
        torch.testing.assert_close(together[i, : len(expected)], expected, rtol=1e-4, atol=1e-4)


def test_gradient_flows_through_the_penalty(little_model) -> None:
    done = sampled(little_model, PENALISED, n=1)
    weight = little_model.model.layers[0].mlp.down_proj.weight
    logp_BT = trained(little_model, done, PENALISED)
    loss = sum(logp_BT[i, : len(c.token_ids)].sum() for i, (_, c) in enumerate(done))
    expected = sum(slowly(little_model, p, c.token_ids, PENALISED).sum() for p, c in done)
    gradients = [torch.autograd.grad(one, weight)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_greedy_takes_the_likeliest_token_after_the_penalty(little_model) -> None:
    said = {}
    for penalty in (1.0, 5.0):
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        done = sampled(little_model, replace(PENALISED, temperature=0.0, repetition_penalty=penalty), n=2)
        for prompt, one in done:
            ids = list(prompt)
            for token in one.token_ids:
                logits = little_model(input_ids=torch.tensor([ids])).logits[:, -1]
                assert int(processor(torch.tensor([ids]), logits).argmax()) == token
                ids.append(token)
        said[penalty] = [one.token_ids for _, one in done]
    assert said[1.0] != said[5.0]
