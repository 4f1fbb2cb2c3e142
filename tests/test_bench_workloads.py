"""The benchmarks run, and the counts of tokens and FLOPs that they publish are correct."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "bench" / "side_by_side"


@pytest.fixture(scope="module")
def workloads() -> ModuleType:
    spec = importlib.util.spec_from_file_location("side_by_side_workloads", FOLDER / "workloads.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_prepared_completions_have_the_lengths_and_rewards_of_the_workload(workloads: ModuleType) -> None:
    work = workloads.WORKLOADS["W5"]
    groups = work.completions(2)
    assert [len(row) for rows in groups for row in rows] == work.lengths(2)
    rewards = [set(workloads.reward([workloads.words(row) for row in rows])) for rows in groups]
    assert rewards[0] == {0.0}
    assert rewards[1] == {0.0, 1.0}


@pytest.mark.survival
def test_peak_memory_covers_this_process(workloads: ModuleType) -> None:
    before = workloads.peak()
    held = bytearray(b"x" * int(2**29 + max(0.0, before * 2**30)))
    assert workloads.peak() >= before + 0.4
    del held


@pytest.mark.survival
def test_the_grpocli_side_runs_an_update(workloads: ModuleType, tmp_path: Path) -> None:
    """Once as released and once without any optimization; both have the same gradient up to rounding."""
    folder = workloads.make_model(workloads.ALL["smoke"].model, tmp_path)
    script = (
        "import grpocli_side, optimizations, sys; {}; sys.argv = ['', 'smoke', sys.argv[1], '1']; grpocli_side.main()"
    )
    changes = "[one.change() for one in optimizations.OPTIMIZATIONS.values()]"
    norms = []
    for change in ("pass", changes):
        command = [sys.executable, "-c", script.format(change), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=False)
        assert done.returncode == 0, done.stderr
        norms.append(json.loads(done.stdout.splitlines()[-1])["logs"][0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.03)
