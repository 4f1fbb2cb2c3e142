"""`flex_attention` over packed rows equals `sdpa` over the same rows.

torch's kernel has no backward pass on a CPU. So gradients are those of the dense form of the same mask, and of torch's
unfused form of the operator; the tiles of the mask, which only kernels read, are compared with torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from grpocli.models import flex_attention as flex
from grpocli.models import shared_prompt_attention as attention
from grpocli.models.flex_attention import TiledMask
from grpocli.models.shared_prompt_attention import Segments
from grpocli.training.packing import FlexPacked

CPU = torch.device("cpu")
HEADS, GROUPS, SIZE = 4, 2, 16
HOW: dict[str, Any] = {"dropout_p": 0.0, "scale": None}
Prompts = Sequence[tuple[int, Sequence[int]]]
LAYOUTS: dict[str, Prompts] = {
    "many completions": [(5, [3, 9, 1, 4, 4, 30, 2, 2]), (12, [5, 5, 5])],
    "a long and a short prompt": [(70, [4, 6]), (1, [40, 33])],
    "groups of one": [(4, [7]), (16, [16]), (1, [1]), (9, [30])],
    "filler, and a prompt alone": [(5, [8, 3]), (7, []), (18, [])],
    "whole tiles": [(32, [16, 16]), (16, [16, 48])],
}
every_layout = pytest.mark.parametrize("prompts", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "TILE", 16)
    monkeypatch.setattr(attention, "MIN_TOKENS", 8)


def states(prompts: Prompts, groups: int = GROUPS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(prompt + sum(lengths) for prompt, lengths in prompts)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, groups, groups)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def with_gradients(out: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad((out * weight).sum(), given)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@every_layout
def test_tokens_attend_to_their_prompt_and_to_earlier_tokens_of_their_completion(prompts: Prompts) -> None:
    expected, start = torch.zeros(2 * [states(prompts)[0].shape[2]], dtype=torch.bool), 0
    for prompt, lengths in prompts:
        first, start = start, start + prompt
        expected[first:start, first:start] = torch.ones(prompt, prompt).tril().bool()
        for n in lengths:
            expected[start : start + n, first : first + prompt] = True
            expected[start : start + n, start : start + n] = torch.ones(n, n).tril().bool()
            start += n
    mask = TiledMask.build(prompts, CPU, on_cpu=True)
    assert (mask.dense == 0).equal(expected)
    assert create_mask(mask.mask.mask_mod, None, None, *mask.mask.seq_lengths, device=CPU)[0, 0].equal(expected)


TABLES = [f"{full}{of}_{kind}" for full in ("", "full_") for of in ("kv", "q") for kind in ("num_blocks", "indices")]


@every_layout
def test_tiles_are_those_that_torch_finds_by_evaluating_every_pair(prompts: Prompts) -> None:
    mask = TiledMask.build(prompts, CPU, on_cpu=False).mask
    length = mask.seq_lengths[0]
    expected = create_block_mask(mask.mask_mod, None, None, length, length, device=CPU, BLOCK_SIZE=flex.TILE)
    for name in TABLES:
        found = getattr(mask, name)
        assert found.equal(getattr(expected, name)), name
        assert found.is_contiguous()
        assert found.dtype == torch.int32


@every_layout
@pytest.mark.parametrize("on_cpu", [True, False])
def test_outputs_and_gradients_are_those_of_sdpa(
    on_cpu: bool, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dense form, and in the unfused form of torch's operator, which reads the function of pairs."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)  # a CPU's kernel has no backward; this form has
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_kernel", lambda: torchs.flex_attention)
    given = states(prompts)
    found, expected = (
        with_gradients(layout.attend(*given, HOW), given)
        for layout in (TiledMask.build(prompts, CPU, on_cpu), Segments.build(prompts, CPU, on_cpu=True))
    )
    assert_close(found, expected)


def of_whole_tiles(prompt: int, *lengths: int) -> Prompts:
    n = prompt + sum(lengths)
    return [(prompt, lengths), (FlexPacked.fitting(n) - n, [])]


@pytest.mark.survival
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code
@torch.no_grad()
def test_the_compiled_kernel_gives_them_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a CPU, which reads the tiles, forward."""
    monkeypatch.setattr(flex, "TILE", 128)
    monkeypatch.setattr(flex, "_call", lambda *states, **_: flex._kernel()(*states[:3], **states[3]))
    flex._kernel.cache_clear()
    counters.clear()
    for prompts in (of_whole_tiles(40 * k, 100, 30 * k, *[5 * k] * 9) for k in range(1, 9)):
        given = [one.detach() for one in states(prompts)]
        with flex.for_any_size() if not counters else nullcontext():
            found, expected = (
                layout.attend(*given, HOW)
                for layout in (TiledMask.build(prompts, CPU, on_cpu=False), Segments.build(prompts, CPU, on_cpu=True))
            )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.survival
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("groups", [2, 4])
def test_one_graph_serves_the_trial_and_every_micro_batch(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without gradients, for some states or all, of few tokens and many; the trial has 2 tiles."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    kernel: Any = torch.compile(torchs.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(flex, "_kernel", lambda: kernel)
    torch.compiler.reset()
    counters.clear()
    for number, tokens in enumerate((17, 1, 100, 300, 1000)):
        prompts = of_whole_tiles(tokens, 3)
        given = states(prompts, groups)
        with_gradient = given if number % 2 else given[:1]
        for one in given[len(with_gradient) :]:
            one.requires_grad_(False)
        mask = TiledMask.build(prompts, CPU, on_cpu=False)
        with flex.for_any_size() if number == 0 else nullcontext():
            with_gradients(mask.attend(*given, HOW), with_gradient)
            with torch.no_grad():
                assert not mask.attend(*given, HOW).requires_grad
    assert counters["stats"]["unique_graphs"] == 1


def test_sizes_are_few_with_little_filler() -> None:
    tokens = range(1, 1 << 14)
    sizes = [FlexPacked.fitting(n) for n in tokens]
    assert len(set(sizes)) <= 120
    assert all(size % flex.TILE == 0 and size >= max(n, 2 * flex.TILE) for n, size in zip(tokens, sizes, strict=True))
    assert all(size - n <= max(n / 16 + flex.TILE, 2 * flex.TILE) for n, size in zip(tokens, sizes, strict=True))
