"""What an update dispatches stays small, on the path of GPUs too: counted as `make bench-operations` counts it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

from grpocli_tools.plan.times import operations as planned_operations

pytestmark = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 12), reason="torch 2.11 has no sum of products in float32 for fake tensors"
)
BENCH = Path(__file__).parents[3] / "bench"
BOUNDS = [("built-in", True, 2_900, 770), ("built-in", False, 3_700, 0), ("0.5B, even", True, 49_000, 14_200)]
"""Of each workload and path (of GPUs or not) the most operations and launches, a tenth above what was counted."""


@pytest.fixture(scope="module")
def operations() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("operations")


@pytest.fixture(scope="module")
def counts(operations: ModuleType) -> dict[tuple[str, bool], Any]:
    return {(name, gpu): operations.of_all_layers(name, gpu) for name, gpu, _, _ in BOUNDS}


@pytest.mark.parametrize(("name", "gpu", "most", "launches"), BOUNDS, ids=str)
def test_an_update_has_few_operations(
    counts: dict[tuple[str, bool], Any], name: str, gpu: bool, most: int, launches: int
) -> None:
    found = counts[name, gpu]
    assert found.operations <= most, found.places.most_common(10)
    assert found.launches <= launches, found.calls.most_common(10)


def test_plans_know_the_operations(counts: dict[tuple[str, bool], Any]) -> None:
    """Of the default run, with a reference, and of three micro-batches of 24 layers without one."""
    for name, layers, batches, forward in (("built-in", 2, 1, 2), ("0.5B, even", 24, 3, 1)):
        found = planned_operations(layers, passes=batches * (forward + 1))
        assert found == pytest.approx(counts[name, True].operations, rel=0.15), name
