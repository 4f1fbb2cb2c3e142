"""Completions that share a prompt's keys attend like separate rows.

On a CPU large `sdpa` calls run in bfloat16 with few different lengths, and small calls in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from grpocli.models import shared_prompt_attention as attention
from grpocli.models.shared_prompt_attention import Segments, calls_of, rows_of

CPU = torch.device("cpu")
HEADS, GROUPS, SIZE, SIZE_OF_VALUES = 4, 2, 8, 6  # values are smaller in DeepSeek-V3
Prompts = list[tuple[int, list[int]]]
PROMPTS: dict[str, Prompts] = {
    "equal": [(3, [7, 7, 7])],
    "similar": [(3, [7, 6, 7, 6])],
    "alone": [(6, [6])],
    "short": [(9, [4, 2, 3])],
    "short and long": [(40, [30, 3, 4, 19, 2])],
    "as long as the prompt": [(4, [18, 18])],
    "a batch": [(5, [3, 8, 1]), (6, [2, 2, 7]), (1, [20, 17]), (30, [4, 4, 4]), (31, [5, 4]), (2, [])],
}


def kinds(prompt: int, lengths: list[int], on_cpu: bool = True) -> list[tuple[int, int, bool]]:
    """Tokens before each row's own, and its own; whether several completions are in it."""
    return [(row.n_prompt, row.n, row.several) for row in rows_of([(prompt, lengths)], on_cpu)]


def test_a_row_is_a_completion_after_its_prompt_or_several_short_ones() -> None:
    assert kinds(12, [64, 8, 6]) == [(0, 12, False), (12, 64, False), (12, 8, False), (12, 6, False)]
    assert kinds(512, [32] * 20) == [(0, 512, False), (512, 512, True), (512, 128, True)]
    assert kinds(100, [40] * 4) == [(0, 100, False), (100, 120, True), (100, 40, False)]
    assert kinds(40, [30, 3, 4, 25]) == [(0, 40, False), (40, 30, False), (40, 7, True), (40, 25, False)]
    assert kinds(5, [3]) == [(5, 3, False)], "a prompt and its only completion are one causal row"
    assert kinds(5, []) == [(0, 5, False)]
    assert kinds(4, [9, 2], on_cpu=False) == [(4, 9, False), (4, 2, False)], "the first row has the prompt's queries"


def test_rows_of_like_size_share_a_call() -> None:
    default = [(n, [4, 5, 6, 8] * 2) for n in (5, 6, 7)]
    assert [len(rows) for rows in calls_of(list(rows_of(default, on_cpu=True)))] == [24, 3]
    long = [(400, [400, 390, 210, 205]), (390, [420, 410])]
    sizes = [[row.n for row in rows] for rows in calls_of(list(rows_of(long, on_cpu=True)))]
    assert sizes == [[210, 205], [420, 410], [400, 390], [400, 390]]


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("masked", [512, 0], ids=["masks", "causal"])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
def test_each_completion_attends_as_a_separate_row(
    prompts: Prompts, masked: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MASKED", masked)
    states = _states(sum(prompt + sum(lengths) for prompt, lengths in prompts))
    segments = Segments.build(prompts, CPU, on_cpu)
    found, _ = attention.attend(torch.nn.Identity(), *states, None, segments)
    expected = _alone(*states, prompts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(found.shape)
    gradients = [torch.autograd.grad((output * weight).sum(), states) for output in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_no_mask_is_larger_than_its_limit(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks, or with smaller ones and in more calls, completions attend as before."""
    states = _states(sum(prompt + sum(lengths) for prompt, lengths in prompts))
    for most, at_once in ((0, 1), (300, 30), (10_000, 100)):
        monkeypatch.setattr(attention, "MAX_MASK_ELEMENTS", most)
        monkeypatch.setattr(attention, "MASKS_AT_ONCE", most)
        monkeypatch.setattr(attention, "KEYS_AT_ONCE", at_once)
        segments = Segments.build(prompts, CPU, on_cpu=True)
        assert all(one.mask is None or one.mask[..., : one.keys].numel() <= most for one in segments.calls)
        assert all(one.rows == 1 or one.rows * one.keys <= at_once for one in segments.calls)
        found, _ = attention.attend(torch.nn.Identity(), *states, None, segments)
        torch.testing.assert_close(found, _alone(*states, prompts), rtol=1e-5, atol=1e-6)


def test_no_token_attends_to_padding_or_to_another_completion() -> None:
    prompts = [(2, [5, 4]), (1, [3, 3])]
    query, key, value = (states.detach() for states in _states(18))
    segments = Segments.build(prompts, CPU, on_cpu=True)
    assert [(one.rows, one.queries, one.keys) for one in segments.calls] == [(4, 5, 7), (2, 2, 2)]
    before, _ = attention.attend(torch.nn.Identity(), query, key, value, None, segments)
    value[:, :, 2] = 100.0  # the first token of the first completion
    after, _ = attention.attend(torch.nn.Identity(), query, key, value, None, segments)
    changed = (before != after).flatten(2).any(2)[0].tolist()
    assert changed == [2 <= token < 7 for token in range(18)]


def _states(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE_OF_VALUES)
    return [torch.randn(1, heads, tokens, size, requires_grad=True) for heads, size in sizes]


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prompts: Prompts) -> torch.Tensor:
    """The output [1, N, heads, D], with every completion computed as a separate row."""
    parts, first = [], 0
    for prompt, lengths in prompts:
        start = first + prompt
        for length in [0, *lengths]:
            which = [*range(first, first + prompt), *range(start, start + length)]
            row = [states[:, :, which] for states in (query, key, value)]
            out = scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)
            parts.append(out[:, :, prompt:] if length else out)
            start += length
        first = start
    return torch.cat(parts, 2).transpose(1, 2)


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
    out = attention.cpu_sdpa(*given, mask, 2, low, {"dropout_p": 0.0, "scale": None})
    assert out.dtype == torch.bfloat16
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The dtype, queries, keys and heads of keys of each call, and its options."""
    seen = []

    def watched(query, key, value, **how):
        seen.append((query.dtype, query.shape[2], key.shape[2], key.shape[1], how["is_causal"], how["enable_gqa"]))
        return scaled_dot_product_attention(query, key, value, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("masked", [False, True])
def test_a_large_call_is_in_bfloat16_and_padded(calls, masked: bool) -> None:
    queries, keys = (300, 701) if masked else (515, 515)
    given, mask = states(queries, keys), later_half(queries, keys) if masked else None
    low, exact = (result(given, mask, dtype) for dtype in (torch.bfloat16, torch.float32))
    filled = (320, 704) if masked else (576, 576)
    assert [call[:3] for call in calls] == [(torch.bfloat16, *filled), (torch.float32, queries, keys)]
    for found, expected in zip(low, exact, strict=True):
        assert found.shape == expected.shape
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_small_call_is_in_float32(calls) -> None:
    for queries, keys in ((255, 600), (256, 511)):
        result(states(queries, keys), later_half(queries, keys), torch.bfloat16)
    assert [dtype for dtype, *_ in calls] == [torch.float32] * 2


def test_a_gpu_attends_in_the_dtype_of_autocast_and_copies_no_grouped_keys_without_a_mask(calls) -> None:
    """The rotation of positions gives queries and keys of float32."""
    query, key, value = _states(30 + 7 + 4 + 36)
    segments = Segments.build([(30, [4, 3]), (4, [18, 18])], torch.device("cpu"), on_cpu=False)
    attend = partial(segments.attend, how={"dropout_p": 0.0, "scale": None})
    with torch.autocast("cpu", torch.bfloat16):
        low = attend(query, key, value.bfloat16())
    causal, masked = (2, True, True), (4, False, False)
    assert [(call[0], call[3:]) for call in calls] == [(torch.bfloat16, masked), (torch.bfloat16, causal)]
    calls.clear()
    exact = attend(query, key, value)
    assert {(call[0], call[-1]) for call in calls} == {(torch.float32, False)}
    assert (low - exact).norm() < 0.02 * exact.norm()
