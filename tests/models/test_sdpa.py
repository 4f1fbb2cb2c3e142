"""On a CPU large `sdpa` calls run in bfloat16 with few different lengths, and small calls in float32."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from grpocli.models import sdpa
from grpocli.models.shared_prompt_attention import Segments


def states(queries: int, keys: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, 4, queries, 16), (1, 2, keys, 16), (1, 2, keys, 16)]
    return [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def later_half(queries: int, keys: int) -> torch.Tensor:
    """A mask in which no token attends to the first half."""
    mask = torch.zeros(queries, keys)
    mask[:, : keys // 2] = float("-inf")
    return mask


def result(given: list[torch.Tensor], mask: torch.Tensor | None, low: torch.dtype) -> list[torch.Tensor]:
    """The output, and the gradients of the inputs."""
    out = sdpa.on_cpu(*given, mask, 2, low, {"dropout_p": 0.0, "scale": None})
    assert out.dtype == torch.bfloat16
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int, int]]:
    """The dtype and the numbers of queries and keys of each call."""
    seen = []
    real = sdpa.scaled_dot_product_attention

    def watched(query, key, value, **how):
        seen.append((query.dtype, query.shape[2], key.shape[2]))
        return real(query, key, value, **how)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("masked", [False, True])
def test_a_large_call_is_in_bfloat16_and_padded(calls, masked: bool) -> None:
    queries, keys = (300, 701) if masked else (515, 515)
    given, mask = states(queries, keys), later_half(queries, keys) if masked else None
    low, exact = (result(given, mask, dtype) for dtype in (torch.bfloat16, torch.float32))
    filled = (320, 704) if masked else (576, 576)
    assert calls == [(torch.bfloat16, *filled), (torch.float32, queries, keys)]
    for found, expected in zip(low, exact, strict=True):
        assert found.shape == expected.shape
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_small_call_is_in_float32(calls) -> None:
    for queries, keys in ((255, 600), (256, 511)):
        result(states(queries, keys), later_half(queries, keys), torch.bfloat16)
    assert [dtype for dtype, *_ in calls] == [torch.float32] * 2


def test_a_gpu_attends_in_the_dtype_of_autocast_and_copies_no_grouped_keys_without_a_mask(monkeypatch) -> None:
    """The rotation of positions gives queries and keys of float32."""
    seen = []

    def watched(query, key, value, **how):
        seen.append((query.dtype, key.shape[1], how["is_causal"], how["enable_gqa"]))
        return scaled_dot_product_attention(query, key, value, **how)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", watched)
    query, key, value = states_of(heads=(4, 2, 2), tokens=30 + 7 + 4 + 36)
    segments = Segments.build([(30, [4, 3]), (4, [18, 18])], torch.device("cpu"), on_cpu=False)
    attend = partial(segments.attend, how={"dropout_p": 0.0, "scale": None})
    with torch.autocast("cpu", torch.bfloat16):
        low = attend(query, key, value.bfloat16())
    causal, masked = (torch.bfloat16, 2, True, True), (torch.bfloat16, 4, False, False)
    assert seen == [masked, causal]
    seen.clear()
    exact = attend(query, key, value)
    assert {(dtype, grouped) for dtype, _, _, grouped in seen} == {(torch.float32, False)}
    assert (low - exact).norm() < 0.02 * exact.norm()


def states_of(heads: tuple[int, ...], tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, tokens, 16) for n in heads]
