"""The batch script in a real cluster, with a stand-in for the training: placement of processes, and shutdown."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest
from slurm.cluster import Cluster
from slurm.submitting import GRPOCLI, MULTIRUN, STAND_IN, Submitted, written

pytestmark = pytest.mark.slurm
MULTINODE = ["hardware=multinode", "hardware.train_nodes=2", "hardware.device=cpu", "hardware.devices_per_node=1"]
MULTINODE += ["engine=vllm"]


def test_one_allocation_is_split_into_training_and_rollout_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted.of(cluster, written(tmp_path / "a sweep", {}, *MULTINODE))
    job.until_over("COMPLETED")
    places = job.rows("places")
    assert sorted((p["part"], p["rank"], p["host"]) for p in places) == [
        ("rollout", 0, "node3"),
        ("train", 0, "node1"),
        ("train", 1, "node2"),
    ]
    assert {p["MASTER_ADDR"] for p in places} == {"node1"}
    assert len({p["MASTER_PORT"] for p in places}) == 1
    assert sorted((e["part"], e["code"]) for e in job.rows("ends")) == [("rollout", 0), ("train", 0), ("train", 0)]
    assert (job.run / "slurm.log").read_text() == job.log


def test_a_signal_before_the_limit_ends_in_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted.of(cluster, written(tmp_path / "sweep", {"steps": 30}, *MULTINODE))
    job.until_step(3)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # as `--signal=B:USR1@S` does
    job.until_over("COMPLETED")
    assert job.shown("Restarts") == "1"
    assert [p["SLURM_RESTART_COUNT"] for p in job.rows("places") if p["rank"] == 0] == [None, None, "1", "1"]
    ports = {(p["SLURM_RESTART_COUNT"], p["MASTER_PORT"]) for p in job.rows("places")}
    assert len(ports) == 2
    assert "queued again (1 of at most 10)" in job.log


def test_a_preempted_job_is_requeued_and_finishes(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted.of(cluster, written(tmp_path / "sweep", {"steps": 30}))
    job.until_step(3)
    urgent = cluster.run("sbatch", "--parsable", "--partition=urgent", "-N3", "--exclusive", "--wrap=sleep 3")
    assert urgent.returncode == 0, urgent.stderr
    job.until_over("COMPLETED")
    assert job.shown("Restarts") == "1"
    assert job.step() == 30


def test_a_preempted_run_that_dies_at_once_is_requeued_too(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted.of(cluster, written(tmp_path / "sweep", {"steps": 60, "train": {"deaf": True}}))
    job.until_step(3)
    cluster.run("sbatch", "--partition=urgent", "-N3", "--exclusive", "--wrap=sleep 3")
    job.until(lambda: job.shown("PreemptTime").startswith("2"), "preemption")
    cluster.run("scancel", "--signal=KILL", f"{job.number}.1")
    job.until_over("COMPLETED")
    assert job.shown("Restarts") == "1"


def test_a_failure_is_not_requeued_and_its_exit_code_is_the_jobs(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted.of(cluster, written(tmp_path / "sweep", {"train": {"fail": 3}}))
    job.until_over("FAILED")
    assert (job.shown("ExitCode"), job.shown("Restarts")) == ("7:0", "0")


def test_the_rollout_nodes_end_when_the_training_fails(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted.of(cluster, written(tmp_path / "sweep", {"train": {"fail": 3}}, *MULTINODE))
    job.until_over("FAILED")
    assert job.shown("Restarts") == "0"
    assert [e["signals"] for e in job.rows("ends") if e["part"] == "rollout"] == [[15]]


def test_the_training_ends_when_the_rollout_nodes_fail(cluster: Cluster, tmp_path: Path) -> None:
    orders = {"steps": 200, "rollout": {"fail": 3}}
    job = Submitted.of(cluster, written(tmp_path / "sweep", orders, *MULTINODE, "hydra.launcher.max_requeues=1"))
    job.until_over("FAILED")
    assert "the rollout part has ended before the training" in job.log
    assert "was told to fail" in job.log
    assert job.shown("Restarts") == "1"
    assert "was requeued 1 times (hydra.launcher.max_requeues)" in job.log
    assert 3 <= job.step() < 200


def test_scancel_leaves_no_process(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted.of(cluster, written(tmp_path / "sweep", {"steps": 1000, "train": {"deaf": True}}, *MULTINODE))
    job.until_step(3)
    assert any("stand_in" in line for line in cluster.processes("node2"))
    cluster.run("scancel", job.number)
    job.until_over("CANCELLED")
    for node in cluster.nodes:
        assert cluster.processes(node) == []
    assert job.shown("Restarts") == "0"


def test_a_node_without_the_run_folder_is_named(cluster: Cluster, tmp_path: Path) -> None:
    script = written(tmp_path / "sweep", {}, *MULTINODE)
    script.write_text(script.read_text().replace("seq 30", "seq 1"))
    with cluster.hidden("node2", tmp_path):
        job = Submitted.of(cluster, script)
        job.until_over("FAILED")
    expected = f"node node2 does not see {job.run}: hydra.sweep.dir must be on a shared file system"
    assert expected in job.log
    assert job.rows("places") == []


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_dead_node_is_named_and_the_run_is_requeued(cluster: Cluster, tmp_path: Path, node: str) -> None:
    """This holds for the first node, which runs the batch script, and for another one."""
    job = Submitted.of(cluster, written(tmp_path / "sweep", {"steps": 40}, *MULTINODE))
    job.until_step(3)
    cluster.power_off(node)
    try:
        job.until(lambda: job.shown("JobState") == "PENDING", "a requeue")
    finally:
        cluster.power_on(node)
    job.until_over("COMPLETED")
    assert job.shown("Restarts") == "1"
    assert node in job.log.partition("start 2")[0].partition("\n")[2]


def test_a_job_submitted_from_an_array_task_requeues_itself(cluster: Cluster, tmp_path: Path) -> None:
    """With the memory per CPU of the enclosing job `srun` would refuse, too."""
    sweep = tmp_path / "inner"
    python = f"hydra.launcher.python={STAND_IN}"
    inner = [*GRPOCLI, *MULTIRUN, "hydra.launcher.wait=false", python, f"hydra.sweep.dir={sweep}"]
    options = ["--parsable", "--array=0", "--mem-per-cpu=10", f"--output={tmp_path}/outer.log"]
    outer = cluster.run("sbatch", *options, f"--wrap=exec {shlex.join(inner)}")
    assert outer.returncode == 0, outer.stderr
    log = tmp_path / "outer.log"
    for _ in range(600):
        if log.exists() and "submitted job" in log.read_text():
            break
        time.sleep(0.1)
    found = re.search(r"submitted job (\d+)", log.read_text())
    assert found, log.read_text()
    job = Submitted(cluster, found[1], sweep / "0")
    job.until_step(3)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.until_over("COMPLETED")
    assert job.shown("Restarts") == "1"
    assert Submitted(cluster, outer.stdout.strip(), sweep).shown("Restarts") == "0"
