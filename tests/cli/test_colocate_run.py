"""Whole runs with vLLM in the trainer's processes, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.running import SMALL, finish, metrics, start

pytestmark = [pytest.mark.vllm, pytest.mark.survival]

NOT_OURS = ("Traceback", "Warning", "WARNING", "INFO", "Loading", "it/s", "Gloo", "vLLM", "rank")


def test_a_run_of_two_processes_with_lora_syncs_samples_and_finishes(tmp_path: Path) -> None:
    """Each has an engine; test_real_vllm_colocate.py syncs full weights."""
    run = tmp_path / "run"
    options = ["hardware.processes=2", "model.lora.rank=4", "optim.lr=0.01", "sync.tolerance=1e-4"]
    _, out = finish(start("train", *SMALL, "engine=vllm_colocate", *options, f"hydra.run.dir={run}"), code=0)
    assert [word for word in NOT_OURS if word in out] == [], out
    rows = metrics(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert all(row["token_mult_prob_error"] < 1.02 for row in rows)
    assert all(row["sync/bytes"] > 0 for row in rows[1:])
    assert all((run / "logs" / log).stat().st_size > 0 for log in ("vllm.log", "vllm_1.log"))
    assert not list((run / "logs").glob("failure_*")), out
