"""On a CPU large `sdpa` calls run in bfloat16 with few different lengths, and small calls in float32."""

from __future__ import annotations

import pytest
import torch

from grpocli.models import sdpa


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
