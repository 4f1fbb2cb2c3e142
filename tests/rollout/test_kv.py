"""Keys and values in the in-process sampler: their cache, their reuse by a later turn, and attention in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from grpocli.rollout import sampler
from grpocli.rollout.sampler import PreallocatedKVLayer, preallocate, sample
from grpocli.rollout.transformers_engine import TransformersEngine
from grpocli.training.policy import Policy
from grpocli.types import Completion, Request, ReusableKV, Sampling

PROMPTS = [[2, 5, 6], [2, 7, 8, 9, 10, 11], [2, 12]]
HEARD = [[20, 21], [22], [23, 24, 25, 26]]
"""Tokens after a turn. Their lengths differ, so that there is padding between turns too."""
FREE = Sampling(max_tokens=9)
GROUPS = [Request(PROMPTS[0], 2, 1), Request(PROMPTS[1], 3, 2)]


class Watched(TransformersEngine):
    """Records the number of tokens of each forward of several tokens, padding included."""

    def __init__(self, model: Any, max_rows: int = 256, dtype: torch.dtype | None = None) -> None:
        @contextmanager
        def sampling_mode() -> Iterator[None]:
            with torch.no_grad(), torch.autocast("cpu", dtype) if dtype else nullcontext():
                yield

        super().__init__(SimpleNamespace(model=model, sampling_mode=sampling_mode), [1, *range(30, 36)], max_rows, None)
        self.prompts: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: Any, args: Any, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] > 1:
            self.prompts.append(tuple(given["input_ids"].shape))


def talk(engine: TransformersEngine, sampling: Sampling, keeps: bool = True, n: int = 2) -> list[list[Completion]]:
    """Three turns of every row, in the order of the rows; each fifth row ends after two."""
    requests = [Request(ids, n, i, reusable_kv=boxes(n) if keeps else ()) for i, ids in enumerate(PROMPTS)]
    turns = [[one for group in engine.generate(requests, sampling) for one in group]]
    rows = [(request.token_ids, reusable) for request in requests for reusable in request.reusable_kv or [None] * n]
    for turn in (1, 2):
        rows = [
            ([*ids, *said.token_ids, *HEARD[(i + turn) % 3]], reusable)
            for i, ((ids, reusable), said) in enumerate(zip(rows, turns[-1], strict=True))
            if turn == 1 or i % 5
        ]
        kept = [(reusable,) if reusable else () for _, reusable in rows]
        asked = [Request(ids, 1, 10 * turn + i, reusable_kv=kept[i]) for i, (ids, _) in enumerate(rows)]
        turns.append([one for (one,) in engine.generate(asked, sampling)])
    return turns


def boxes(n: int) -> tuple[ReusableKV, ...]:
    return tuple(ReusableKV() for _ in range(n))


def assert_same(one: Sequence[Sequence[Completion]], other: Sequence[Sequence[Completion]]) -> None:
    for turn, as_before in zip(one, other, strict=True):
        assert [done.token_ids for done in turn] == [done.token_ids for done in as_before]
        for a, b in zip(turn, as_before, strict=True):
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=1e-4, atol=1e-4)


@pytest.fixture
def model(little_model):
    return deepcopy(little_model)


@pytest.mark.parametrize("sampling", [FREE, replace(FREE, top_k=7, repetition_penalty=1.3)])
def test_reuse_samples_the_same_tokens(model, sampling: Sampling) -> None:
    anew = talk(Watched(model), sampling, keeps=False)
    assert len({len(done.token_ids) for done in anew[0]}) > 2
    engine = Watched(model)
    assert_same(talk(engine, sampling), anew)
    longest = 1 + max(map(len, HEARD))
    assert engine.prompts == [(3, 6), (6, longest), (4, longest)]


def test_reuse_works_with_bfloat16_weights(model) -> None:
    """FSDP2 gathers such weights without autocast; keys are stored in float32 and queries are bfloat16."""
    assert all(done.token_ids for turn in talk(Watched(model.bfloat16()), FREE) for done in turn)


def test_changed_weights_compute_every_token_again(model) -> None:
    engine = Watched(model)
    request = Request(PROMPTS[0], 1, 0, reusable_kv=boxes(1))
    ((said,),) = engine.generate([request], FREE)
    engine.sync(1)
    again = Request([*PROMPTS[0], *said.token_ids, 20], 1, 1, reusable_kv=request.reusable_kv)
    engine.generate([again], FREE)
    assert engine.prompts[-1] == (1, len(again.token_ids))


def test_the_number_of_kept_rows_is_limited(model) -> None:
    engine = Watched(model, max_rows=4)
    found = talk(engine, FREE)
    assert_same(found, talk(Watched(model), FREE, keeps=False))
    held = boxes(6)
    engine.generate([Request(PROMPTS[0], 2, 0, reusable_kv=held[i : i + 2]) for i in (0, 2, 4)], FREE)
    assert [reusable.state is not None for reusable in held] == [True] * 4 + [False] * 2


def test_a_model_with_a_sliding_window_keeps_nothing() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=4)).eval()
    assert_same(talk(Watched(model), FREE), talk(Watched(model), FREE, keeps=False))
    request = Request(PROMPTS[0], 1, 0, reusable_kv=boxes(1))
    Watched(model).generate([request], FREE)
    assert request.reusable_kv[0].state is None


def test_reuse_works_with_rows_of_one_length(model) -> None:
    """Such a batch has no padding and no mask."""

    def turns(keeps: bool) -> list[Completion]:
        engine = TransformersEngine(SimpleNamespace(model=model, sampling_mode=torch.no_grad), [], 256, None)
        first = Request(PROMPTS[0], 4, 0, reusable_kv=boxes(4) if keeps else ())
        (said,) = engine.generate([first], FREE)
        heard = [[*PROMPTS[0], *done.token_ids, 20] for done in said]
        asked = [Request(ids, 1, i, reusable_kv=first.reusable_kv[i : i + 1]) for i, ids in enumerate(heard)]
        return [one for (one,) in engine.generate(asked, FREE)]

    assert_same([turns(True)], [turns(False)])


# The cache


def states(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values may differ in size and dtype."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, 2, tokens, 8, generator=generator)
    return keys, torch.randn(rows, 2, tokens, 4, generator=generator).bfloat16()


def test_contents_equal_those_of_transformers_cache() -> None:
    plain, roomy = DynamicCache(), DynamicCache()
    for cache in (plain, roomy):
        cache.update(*states(3, 5, 0), 0)
    preallocate(roomy, 4)
    assert isinstance(roomy.layers[0], PreallocatedKVLayer)
    index = torch.tensor([2, 0, 0, 1])
    for cache in (plain, roomy):
        cache.update(*states(3, 1, 1), 0)
        cache.batch_select_indices(index)
    for k in range(6):  # two more than the preallocated length
        expected, found = (cache.update(*states(4, 1, 2 + k), 0) for cache in (plain, roomy))
        for one, other in zip(expected, found, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(other, one, rtol=0, atol=0)
        assert roomy.get_seq_length() == plain.get_seq_length()
        assert roomy.get_mask_sizes(1, 0) == plain.get_mask_sizes(1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_have_the_dtype_of_attention(dtype: torch.dtype) -> None:
    cache = DynamicCache()
    cache.update(*states(2, 5, 0), 0)
    preallocate(cache, 4, dtype)
    found = cache.update(*states(2, 1, 1), 0)
    for one, *pieces in zip(found, states(2, 5, 0), states(2, 1, 1), strict=True):
        torch.testing.assert_close(one, torch.cat(pieces, 2).to(dtype), rtol=0, atol=0)


def test_other_kinds_of_layers_are_not_replaced() -> None:
    class Other(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.update(*states(2, 3, 0), 0)
    cache.layers = [Other(), DynamicLayer()]  # the second layer has no contents yet
    preallocate(cache, 10)
    assert [type(layer) for layer in cache.layers] == [Other, DynamicLayer]


# Attention, which a CPU computes in float32 whatever the model's dtype


def sampled(model, requests: list[Request]) -> list[Completion]:
    return [one for group in sample(model, requests, FREE, [1], 0) for one in group]


@pytest.mark.parametrize("requests", [GROUPS, GROUPS[:1]], ids=["padded", "no padding"])
def test_tokens_equal_those_of_sdpa(model, requests) -> None:
    plain = sampled(model, requests)
    with sampler.float32_attention(model):
        assert model.config._attn_implementation == sampler.SAMPLING_ATTENTION
        ours = sampled(model, requests)
    for one, other in zip(plain, ours, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-5, atol=1e-6)


def test_under_autocast_keys_queries_and_values_are_float32(model, monkeypatch) -> None:
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, *args, **how):
        out = real(query, key, value, *args, **how)
        if query.shape[2] == 1:
            seen.append((key.dtype, value.dtype, out.dtype))
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    policy = Policy(model, model, torch.bfloat16)
    TransformersEngine(policy, [1], 256, None).generate(GROUPS, FREE)
    assert model.config._attn_implementation == "sdpa", "after sampling, too"
    assert set(seen) == {(torch.float32,) * 3}
    assert len(seen) == 2 * (FREE.max_tokens - 1), "every layer, every token but the first"
