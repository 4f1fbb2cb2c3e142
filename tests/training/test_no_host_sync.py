"""The micro-batch loop never waits for the GPU.

Tensors without numbers (torch's device `meta`) stand in for those on a GPU: an operation that reads a number, or whose
result depends on numbers, raises. Copies from the CPU that wait are counted, by their line in grpocli.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composed import built
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.test_packing import fresh

import grpocli
from grpocli.algorithm.aggregate import Totals
from grpocli.config.schema import Train
from grpocli.distributed.parallel import Parallel, loss_scaler
from grpocli.hardware import to_device
from grpocli.models import flex_attention
from grpocli.models import shared_prompt_attention as attention
from grpocli.training.optim import AdamW
from grpocli.training.packing import FlexPacked, Packed, Padded, RowBatch
from grpocli.training.policy import Policy, Reference
from grpocli.training.update import Updater, Window
from grpocli.types import Row, Sampling

GPU = torch.device("meta")
ROWS = [Row([3, 4, 5], [6] * n, [1] * n, 1.0 - k, k // 2, [-3.0] * n) for k, n in enumerate((4, 9, 20, 3))]


class Copies(TorchDispatchMode):
    """Counts copies from the CPU to the GPU, and the lines of grpocli whose copies wait."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.waiting = 0, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            devices = {one.device.type for one in tree_leaves((args, result)) if isinstance(one, torch.Tensor)}
            if len(devices) == 2:
                self.made += 1
                if not ((kwargs or {}).get("non_blocking") or True in args[2:]):
                    self.waiting[line_of_grpocli()] += 1
        return result


def line_of_grpocli() -> str:
    folder = Path(grpocli.__file__).parent
    last = [frame for frame in traceback.extract_stack() if folder in Path(frame.filename).parents][-1]
    return f"{Path(last.filename).name}: {last.line}"


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` has none."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def updater(*algorithm: str, layout: Any) -> Updater:
    with GPU:
        model, initial = fresh(), fresh()
    policy, chosen = Policy(model, model, torch.float32, Parallel(GPU)), built(*algorithm)
    policy.parallel.scaler = loss_scaler(GPU, torch.float16)
    if layout is not Padded:
        policy.packed, policy.packs = layout, attention.enable(model, 64) and attention.enable(initial, 64)
        assert policy.packs
    world: Any = SimpleNamespace(device=GPU, context_parallel=None)
    reference = Reference(initial, policy) if chosen.needs_reference else None
    return Updater(world, policy, reference, chosen, AdamW(lr=0.1), None, Train(epochs=2), Sampling(30), 10)


def two_epochs(up: Updater) -> Copies:
    """The copies of two micro-batches in two epochs, with log-probs under the reference before."""
    groups, rows = torch.arange(2, device=GPU), [copy.copy(row) for row in ROWS]
    totals = Totals(len(rows), 36, groups, groups + 18, groups >= 0, rows_in_loss=len(rows))
    window = Window(0, [RowBatch.of(some, GPU) for some in (rows[:2], rows[2:])], totals)
    up.windows = [window]
    up.policy.model.train()
    with Copies() as copies:
        up._score_before_updates(window)
        for _ in range(2):
            up.accumulate(window)
    assert all(weight.grad is not None for weight in up.policy.model.parameters())
    return copies


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [("grpo", Packed), ("dapo", Padded), ("drgrpo algorithm.aggregate.length=10", Packed), ("grpo", FlexPacked)],
)
def test_copies_do_not_wait(no_autocast, algorithm: str, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_kernel", lambda: kernel)
    copies = two_epochs(updater(*f"algorithm={algorithm}".split(), layout=layout))
    assert copies.made > (40 if layout is FlexPacked else 20)
    assert not copies.waiting


def test_a_copy_to_a_gpu_comes_from_pinned_memory_and_does_not_wait() -> None:
    """A copy from other memory waits, whatever `non_blocking` says."""
    tensor, gpu = Mock(device=torch.device("cpu")), torch.device("cuda")
    copied = tensor.pin_memory.return_value.to
    assert to_device(tensor, gpu) is copied.return_value
    copied.assert_called_once_with(gpu, non_blocking=True)


def test_waiting_is_noticed(no_autocast, monkeypatch: pytest.MonkeyPatch) -> None:
    up = updater("algorithm=grpo", layout=Packed)
    plain = type(up.algorithm).loss

    def loss_is(change: Callable[[torch.Tensor], Any]) -> None:
        def loss(*given: Any, **others: Any) -> Any:
            value, metrics = plain(*given, **others)
            return change(value), metrics

        monkeypatch.setattr(type(up.algorithm), "loss", loss)

    loss_is(lambda value: value + torch.ones(1).to(GPU).squeeze())
    assert sum(two_epochs(up).waiting.values()) == 4
    loss_is(torch.Tensor.item)
    with pytest.raises(RuntimeError, match="item"):
        two_epochs(up)
