"""A cache with room holds what transformers' own holds."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from grpocli.rollout.cache import RoomyLayer, make_room


def states(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values need not be of one size or dtype."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, 2, tokens, 8, generator=generator)
    return keys, torch.randn(rows, 2, tokens, 4, generator=generator).bfloat16()


def test_it_holds_what_the_plain_one_holds() -> None:
    plain, roomy = DynamicCache(), DynamicCache()
    for cache in (plain, roomy):
        cache.update(*states(3, 5, 0), 0)
    make_room(roomy, 4)
    assert isinstance(roomy.layers[0], RoomyLayer)
    index = torch.tensor([2, 0, 0, 1])
    for cache in (plain, roomy):
        cache.update(*states(3, 1, 1), 0)
        cache.batch_select_indices(index)
    for k in range(6):  # two more than there is room for
        expected, found = (cache.update(*states(4, 1, 2 + k), 0) for cache in (plain, roomy))
        for one, other in zip(expected, found, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(other, one, rtol=0, atol=0)
        assert roomy.get_seq_length() == plain.get_seq_length()
        assert roomy.get_mask_sizes(1, 0) == plain.get_mask_sizes(1, 0)


def test_tokens_do_not_copy_those_before_them() -> None:
    cache = DynamicCache()
    cache.update(*states(2, 3, 0), 0)
    make_room(cache, 10)
    place = cache.layers[0].keys.data_ptr()
    for _ in range(10):
        cache.update(*states(2, 1, 0), 0)
    assert cache.layers[0].keys.data_ptr() == place


def test_other_kinds_of_layers_stay() -> None:
    class Other(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.update(*states(2, 3, 0), 0)
    cache.layers = [Other()]
    make_room(cache, 10)
    assert type(cache.layers[0]) is Other
