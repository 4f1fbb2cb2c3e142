"""A preallocated cache has the same contents as transformers' cache."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from grpocli.rollout.sampler import PreallocatedKVLayer, preallocate


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
