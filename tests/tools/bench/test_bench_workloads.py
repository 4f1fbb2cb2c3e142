"""The benchmarks run, the counts that they publish are correct, and what an update dispatches stays small."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version
from porting.printed import assert_composes

from grpocli.composition.compose import compose
from grpocli_tools.plan.times import operations as planned_operations

BENCH = Path(__file__).parents[3] / "bench"
FOLDER = BENCH / "side_by_side"


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of bench/ as it imports its own."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (BENCH, FOLDER):
            patch.syspath_prepend(str(folder))
        yield importlib.import_module


@pytest.fixture(scope="module")
def workloads(bench: Callable[[str], ModuleType]) -> ModuleType:
    return bench("workloads")


@pytest.mark.slow
def test_every_run_of_every_benchmark_composes(bench: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Names of workloads hold commas and spaces, which values of keys must quote."""
    side, memory = map(bench, ("grpocli_side", "memory"))
    scaling, overlap, small, kinds = map(bench, ("scaling", "overlap", "small_gpus", "multiplication"))
    options, rows = bench("optimizations").OPTIMIZATIONS.values(), bench("long_rows")
    model = ["model=hf", f"model.path={tmp_path}"]
    for name, work in side.ALL.items():
        run = compose(side.overrides(name, str(tmp_path), tmp_path))
        assert work.sampled or run.engine.workload == name
    given = side.overrides("smoke", str(tmp_path), tmp_path)
    runs = [[*given, *one.both, *more] for one in options for more in (one.options, one.with_it)]
    runs += [[*given, *more] for more in rows.WAYS.values()]
    runs += [[*memory.SHORT, *memory.BATCH, *more, *model] for _, *more in memory.CASES.values()]
    runs += [[*scaling.BATCH, *model, *more] for more, _ in scaling.WAYS.values()]
    runs += [[*small.RECIPE, *more] for more in small.KINDS.values()]
    runs += [["engine=vllm", "recipe=multiplication", f"model.path={tmp_path}", *bench("startup").SMALL]]
    runs += [overlap.overrides(1, str(tmp_path), 7, 32)]
    runs += [kinds.overrides(tmp_path, str(tmp_path), 1, engine) for engine in ("vllm", "transformers")]
    for overrides in runs:
        assert_composes(overrides)


def test_needed_tokens_are_prompts_once_and_rows_with_a_gradient(workloads: ModuleType) -> None:
    assert workloads.WORKLOADS["W3"].needed(0) == (2 * 512 + 16 * 32, 16 * 32)
    assert workloads.WORKLOADS["W5"].needed(0) == (12 + 8 * 64, 8 * 64)
    work = workloads.WORKLOADS["W4"]
    assert work.needed(1) == (24 + sum(work.lengths(1)), sum(work.lengths(1)))
    assert max(work.lengths(1)) <= 256


def test_pairs_are_counted_as_in_causal_attention(workloads: ModuleType) -> None:
    work = workloads.Workload("", groups=1, rows=2, prompt=3, longest=4)
    seen = [range(k + 1) for k in range(3)] + [range(3 + k + 1) for k in range(4)] * 2
    assert work.pairs(0) == sum(map(len, seen)) - (3 + 2 * 4) / 2, "a token's pair with itself counts half"


def test_flops_follow_from_the_weights(workloads: ModuleType, tmp_path: Path) -> None:
    """Six operations for each weight and token; the head's weights count for completion tokens only."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = workloads.MODELS["0.4M"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    head = model.lm_head.weight.numel()
    work = workloads.Workload("", "0.4M", groups=1, rows=2, prompt=3, longest=4)
    assert work.flops(0) == 6 * (layers * 11 + head * 8)


@pytest.mark.survival
def test_the_grpocli_side_runs_an_update(workloads: ModuleType, tmp_path: Path) -> None:
    """Once as released and once without any optimization; both have the same gradient up to rounding."""
    folder = workloads.make_model(workloads.ALL["smoke"].model, tmp_path)
    script = (
        "import grpocli_side as side, optimizations, sys; {}; sys.argv = ['', 'smoke', sys.argv[1], '1']; side.main()"
    )
    changes = "[one.change() for one in optimizations.OPTIMIZATIONS.values()]"
    norms = []
    for change in ("pass", changes):
        command = [sys.executable, "-c", script.format(change), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=False)
        assert done.returncode == 0, done.stderr
        norms.append(json.loads(done.stdout.splitlines()[-1])["logs"][0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.03)


needs_products = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 12), reason="torch 2.11 has no sum of products in float32 for fake tensors"
)
BOUNDS = [("built-in", True, 2_900, 770), ("built-in", False, 3_700, 0), ("0.5B, even", True, 49_000, 14_200)]
"""Of each workload and path (of GPUs or not) the most operations and launches, a tenth above what was counted."""


@pytest.fixture(scope="module")
def counts(bench: Callable[[str], ModuleType]) -> dict[tuple[str, bool], Any]:
    return {(name, gpu): bench("operations").of_all_layers(name, gpu) for name, gpu, _, _ in BOUNDS}


@needs_products
@pytest.mark.parametrize(("name", "gpu", "most", "launches"), BOUNDS, ids=str)
def test_an_update_has_few_operations(counts, name: str, gpu: bool, most: int, launches: int) -> None:
    found = counts[name, gpu]
    assert found.operations <= most, found.places.most_common(10)
    assert found.launches <= launches, found.calls.most_common(10)


@needs_products
def test_plans_know_the_operations(counts: dict[tuple[str, bool], Any]) -> None:
    """Of the default run, with a reference, and of three micro-batches of 24 layers without one."""
    for name, layers, batches, forward in (("built-in", 2, 1, 2), ("0.5B, even", 24, 3, 1)):
        found = planned_operations(layers, passes=batches * (forward + 1))
        assert found == pytest.approx(counts[name, True].operations, rel=0.15), name
