"""What an update dispatches stays small, on the path of GPUs too: counted as `make bench-operations` counts it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
BOUNDS = [
    ("built-in", True, 5_000, 1_000),
    ("built-in", False, 5_000, 0),
    ("0.5B, even", True, 86_000, 24_500),
]
"""Of each workload and path (of GPUs or not) the most operations and launches, a tenth above what was counted."""


@pytest.fixture(scope="module")
def operations() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("operations")


@pytest.mark.parametrize(("name", "gpu", "most", "launches"), BOUNDS, ids=lambda one: str(one))
def test_an_update_has_few_operations(operations: ModuleType, name: str, gpu: bool, most: int, launches: int) -> None:
    found = operations.of_all_layers(name, gpu)
    assert found.operations <= most, found.places.most_common(10)
    assert found.launches <= launches, found.calls.most_common(10)


def test_each_layer_adds_as_many(operations: ModuleType) -> None:
    """So that models of one and of two layers say what one of three has."""
    built_in = {layers: operations.counted("built-in", True, layers) for layers in (1, 2, 3)}
    for kind in ("operations", "dispatched", "launches"):
        one, two, three = (getattr(built_in[layers], kind) for layers in (1, 2, 3))
        assert three - two == two - one > 0, kind


def test_operations_are_those_that_torch_records(operations: ModuleType) -> None:
    """Calls within a call count, and on real tensors of a CPU the same ones as here."""
    x = torch.ones(3, 4)
    assert operations.recorded(lambda: x.to(torch.float64)) == ["to", "_to_copy", "empty_strided", "copy_"]
    assert [operations.is_kernel(name) for name in ("mm", "copy_", "transpose", "empty_strided", "detach")] == [
        *(True, True, False, False, False)
    ]
