"""A whole run on several nodes of a real cluster, with a real vLLM server on one of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from cli.running import metrics
from slurm.cluster import Cluster
from slurm.submitting import detached, wait_for_step

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NODES = ["hardware=multinode", "hardware.train_nodes=2", "hardware.rollout_nodes=1"]
CPUS = ["hardware.device=cpu", "hardware.devices_per_node=1", "hardware.parallel=ddp"]


def test_two_training_nodes_and_a_vllm_node_train_the_default_model(cluster: Cluster, tmp_path: Path) -> None:
    """The job is stopped in the middle and requeued, and the run continues."""
    job = detached(cluster, tmp_path / "sweep", *NODES, *CPUS, "engine=vllm")
    wait_for_step(job, 20, seconds=400)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.until_over("COMPLETED", seconds=600)
    assert job.shown("Restarts") == "1"
    summary = json.loads((job.run / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["eval/accuracy_before"] < 0.6
    assert summary["eval/accuracy"] > 0.8
    assert [row["step"] for row in metrics(job.run)] == list(range(1, 61))
    assert "2 machines" in job.log
    assert [cluster.processes(node) for node in cluster.nodes] == [[], [], []]
