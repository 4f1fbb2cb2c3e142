"""Completions that share a prompt's keys attend like separate rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from grpocli.models import sdpa
from grpocli.models import shared_prompt_attention as attention
from grpocli.models.shared_prompt_attention import Block, Segment, Segments, split_into_blocks

CPU = torch.device("cpu")
HEADS, GROUPS, SIZE = 4, 2, 8


def test_a_block_has_rows_of_similar_length_or_many_short_ones() -> None:
    assert split_into_blocks(12, [64] * 8) == [list(range(8))]
    assert split_into_blocks(12, [100, 90, 60, 40]) == [[0, 1, 2], [3]]
    assert split_into_blocks(12, [40, 8, 8, 8]) == [[0], [1, 2, 3]]
    assert split_into_blocks(200, [150] * 64) == [list(range(64))]
    assert split_into_blocks(512, [32] * 20) == [list(range(16)), [16, 17, 18, 19]]
    assert split_into_blocks(100, [40, 40, 40, 40]) == [[0, 1, 2], [3]]
    assert split_into_blocks(5, [0, 3]) == [[0], [1]]
    assert split_into_blocks(5, []) == []


@pytest.mark.parametrize(
    ("prompt", "lengths", "rows", "filled"),
    [
        (3, [7, 7, 7], 3, False),
        (3, [7, 6, 7, 6], 4, True),
        (6, [6], 1, False),
        (9, [7, 6], 2, True),
        (9, [4, 2, 3], 1, False),
        (1, [20, 17], 2, True),
    ],
)
@pytest.mark.parametrize("masked", [512, 0], ids=["masks", "causal"])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
def test_each_completion_attends_as_a_separate_row(
    prompt: int, lengths: list[int], rows: int, filled: bool, masked: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "MASKED", masked)
    block = Block.build(prompt, lengths, CPU, on_cpu)
    assert (block.rows, block.row_index is not None) == (rows, filled)
    assert (block.mask is None) == (max(lengths) >= prompt and not (masked and on_cpu))
    states = _states(prompt + sum(lengths))
    segments = Segments((Segment(prompt, (block,)),), on_cpu)
    found, _ = attention.attend(torch.nn.Identity(), *states, None, segments)
    expected = _alone(*states, prompt, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(found.shape)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), states),
        torch.autograd.grad((expected * weight).sum(), states),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("prompt", "lengths"), [(9, [4, 2, 3]), (9, [7, 6]), (40, [5] * 12)])
def test_no_mask_is_larger_than_its_limit(prompt: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks, or with smaller ones, completions attend as before."""
    states = _states(prompt + sum(lengths))
    for most in (0, 300, 10_000):
        monkeypatch.setattr(attention, "MAX_MASK_ELEMENTS", most)
        parts = [[lengths[k] for k in block] for block in split_into_blocks(prompt, lengths)]
        blocks = tuple(Block.build(prompt, part, CPU, on_cpu=True) for part in parts)
        assert all(block.mask is None or block.mask.numel() <= most for block in blocks)
        segments = Segments((Segment(prompt, blocks),), on_cpu=True)
        found, _ = attention.attend(torch.nn.Identity(), *states, None, segments)
        torch.testing.assert_close(found, _alone(*states, prompt, lengths), rtol=1e-5, atol=1e-6)


def test_filler_is_never_attended_to() -> None:
    block = Block.build(2, [5, 4], CPU, on_cpu=True)
    query, key, value = (states.detach() for states in _states(2 + 9))
    segments = Segments((Segment(2, (block,)),), on_cpu=True)
    before, _ = attention.attend(torch.nn.Identity(), query, key, value, None, segments)
    assert block.row_index is not None
    assert block.row_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0], "the second row ends with the first row's first"
    value[:, :, 2] = 100.0
    after, _ = attention.attend(torch.nn.Identity(), query, key, value, None, segments)
    assert torch.equal(before[:, -4:], after[:, -4:])
    assert not torch.equal(before[:, 2:7], after[:, 2:7])


def _states(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prompt: int, lengths: list[int]
) -> torch.Tensor:
    """The output [1, N, heads, D], with every completion computed as a separate row."""
    parts, start = [], prompt
    for length in [0, *lengths]:
        which = [*range(prompt), *range(start, start + length)]
        row = [states[:, :, which] for states in (query, key, value)]
        out = scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)
        parts.append(out[:, :, prompt:] if length else out)
        start += length
    return torch.cat(parts, 2).transpose(1, 2)
