"""Prefetching on a real vLLM server with requests in flight: weight versions, staleness, and the objective's metrics.

test_tools_run.py has a run without requests in flight.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from cli.running import SMALL, metrics

from grpocli.runs.rollouts import read_rollouts

pytestmark = pytest.mark.vllm

RUN = ["train", *SMALL, "engine=vllm", "checkpoint.every=3", "rollout.max_staleness=1"]


def ran(grpocli, run: Path, steps: int, *options: str) -> list[dict[str, Any]]:
    code, out, err = grpocli(*RUN, *options, f"train.steps={steps}", f"hydra.run.dir={run}")
    assert code == 0, err
    assert "ahead   1 step at most" in out
    rows = metrics(run)
    assert [row["weight_version"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert (row["sampling/kept"], row["sampling/stale"]) == (4, 0)
        assert all(math.isfinite(value) for value in row.values())
        assert row["lr"] > 0
        assert row["clip_ratio/region_mean"] == 0, (
            "old log-probs are the trainer's own, and the correction covers the difference"
        )
        assert 0.5 < row["sampling_importance_ratio"] < 2
    assert max(row["staleness/max"] for row in rows) == 1
    return rows


def completions(run: Path, step: int) -> list[dict[str, Any]]:
    return read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")


@pytest.mark.survival
def test_weights_change_under_running_requests(grpocli, tmp_path: Path) -> None:
    """Timing decides here whether a sync meets a running request; test_real_vllm_server.py makes sure of one."""
    slow = ["rollout.max_completion_tokens=50", "model.warm_start_steps=1", "engine.vllm_args.max_num_seqs=4"]
    shape = ["rollout.group_size=2", "checkpoint.every=0", "optim.lr=1e-5", "eval.problems=0"]
    refused = ["algorithm=dapo", "algorithm.keep.reward=format", "reward=[format]", "reward.format.pattern='.*[02468]'"]
    ran(grpocli, tmp_path, 3, "rollout.in_flight=true", *slow, *shape, *refused)
    for step in range(1, 4):
        for row in completions(tmp_path, step):
            spans = row["version_spans"] or [[row["version"], len(row["completion_ids"])]]
            assert sum(tokens for _, tokens in spans) == len(row["completion_ids"])
            assert [version for version, _ in spans] in ([step - 1], [step], [step - 1, step])
            assert row["version"] == spans[0][0]
