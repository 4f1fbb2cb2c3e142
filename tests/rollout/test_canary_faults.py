"""What the probe finds alone, under a canary, after dummy weights, with real vLLM: docs/evidence/vllm.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollout.vllm_tiny import build_model, build_moe

pytestmark = [pytest.mark.vllm, pytest.mark.survival]

SWAPPED, UNDEFINED = "swapped in all layers", "which vLLM fuses"
"""Faults that put other weights in a place than the run's first ones, so that every check finds them, and those that
leave memory there that nobody has written.
"""
OUTSIDE = "one token's embedding is kept, of a token outside the probe"
"""Found in float32 if the head is tied to it; otherwise only if one of the tokens that a check samples is this one."""


def table(model: Path, dtype: str, kind: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rollout.canary_faults", str(model), dtype, kind, "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["fault"]: row for row in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(("experts", "dtype"), [(False, "float32"), (True, "bfloat16")], ids=["dense", "experts"])
def test_a_weight_that_never_arrives_is_found_by_the_canary_and_after_dummy_weights(
    experts: bool, dtype: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    rows = table(build_moe(folder) if experts else build_model(folder, tied=True), dtype, "weights")
    none = rows.pop("none")
    assert [none["first"], none["updated"], none["canary"], none["dummy"]] == [False] * 4
    outside = rows.pop(OUTSIDE)
    if not experts:
        assert outside["canary"]
        assert outside["dummy"]
    for fault, row in rows.items():
        assert row["canary"], row
        assert row["dummy"], row
        packed_again = experts and fault == "a layer is missing"
        if UNDEFINED not in fault:
            assert row["first"] == (packed_again or SWAPPED in fault), row


def test_an_adapter_that_is_not_bound_is_found_by_the_canary(tmp_path: Path) -> None:
    rows = table(build_model(tmp_path / "model", tied=True), "bfloat16", "adapters")
    none = rows.pop("none")
    assert [none["first"], none["updated"], none["canary"]] == [False] * 3
    for row in rows.values():
        assert row["canary"], row
        assert not row["first"], row
