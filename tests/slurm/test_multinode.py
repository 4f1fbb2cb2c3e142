"""A whole run on several nodes of a real cluster, with a real vLLM server on one of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from slurm.cluster import Cluster
from slurm.submitting import GRPOCLI, MULTIRUN

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NODES = ["hardware=multinode", "hardware.train_nodes=2", "hardware.rollout_nodes=1"]
CPUS = ["hardware.device=cpu", "hardware.devices_per_node=1", "hardware.parallel=ddp"]


def test_two_training_nodes_and_a_vllm_node_train_the_default_model(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "sweep" / "0"
    launcher = [f"hydra.sweep.dir={run.parent}", "hydra.launcher.max_requeues=0"]
    done = cluster.run(*GRPOCLI, *MULTIRUN, *NODES, *CPUS, "engine=vllm", *launcher, timeout=900)
    log = (run / "slurm.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["eval/accuracy_before"] < 0.6
    assert summary["eval/accuracy"] > 0.8
    assert "2 machines" in log
    assert [cluster.processes(node) for node in cluster.nodes] == [[], [], []]
