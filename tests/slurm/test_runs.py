"""Whole runs on a real cluster: submitted, waited for or detached, preempted, ended by their time limit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli.running import metrics, without_times
from safetensors.torch import load_file
from slurm.cluster import Cluster
from slurm.submitting import GRPOCLI, MULTIRUN, detached, wait_for_step

pytestmark = pytest.mark.slurm
SMALL = ["engine=transformers", "model.warm_start_steps=20", "rollout.prompts_per_step=4", "rollout.group_size=4"]
SMALL += ["eval.problems=4", "eval.samples=2"]
EVEN = ["reward=[format]", "reward.format.pattern='.*[02468]'"]
"""Rewards about half of all answers, so that every step has something to learn."""
FOUR_NODES = ["hardware=multinode", "hardware.train_nodes=4", "hardware.rollout_nodes=0", "hardware.devices_per_node=1"]
LONG = [*SMALL, *EVEN, "train.steps=60", "checkpoint.every=25", "optim.warmup_steps=4"]


@pytest.fixture(scope="module")
def uninterrupted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """The uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOCLI_CACHE", str(shared_cache))
        job = detached(cluster, tmp_path_factory.mktemp("uninterrupted") / "sweep", *LONG)
        job.until_over("COMPLETED", seconds=180)
    assert all(row["grad_norm"] > 0 for row in metrics(job.run)), "a run that learns nothing cannot show a difference"
    return job.run


def assert_same_run(run: Path, other: Path) -> None:
    assert [row["step"] for row in metrics(run)] == list(range(1, 61))
    assert without_times(metrics(run)) == without_times(metrics(other))
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


def test_a_sweep_of_two_is_an_array_and_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    done = cluster.run(*GRPOCLI, *MULTIRUN, *SMALL, "train.steps=2", "seed=0,1", f"hydra.sweep.dir={sweep}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("COMPLETED") == 2
    for i in range(2):
        assert f"_{i}  {sweep}/{i}  seed={i}\n" in done.stdout
        summary = json.loads((sweep / f"{i}" / "summary.json").read_text())
        assert (summary["steps"], summary["exit"]) == (2, "done")
        assert [row["step"] for row in metrics(sweep / f"{i}")] == [1, 2]
        assert "the final model is in" in (sweep / f"{i}" / "slurm.log").read_text()


@pytest.mark.parametrize(
    ("overrides", "partition", "message"),
    [
        (["hydra.launcher.partition=gpu"], "debug", "hydra.launcher.partition=gpu: there is no such partition; choose"),
        ([], "gpu", "hydra.launcher.partition=gpu: there is no such partition; choose one of debug (3 nodes)"),
        ([*FOUR_NODES], None, "the run needs 4 nodes"),
    ],
)
def test_a_missing_resource_is_refused_before_submission(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    partition: str | None,
    message: str,
) -> None:
    if partition:
        monkeypatch.setenv("SBATCH_PARTITION", partition)  # the default that sbatch reads
    jobs = cluster.run("squeue", "--noheader", "--states=all").stdout
    done = cluster.run(*GRPOCLI, *MULTIRUN, *SMALL, *overrides, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert cluster.run("squeue", "--noheader", "--states=all").stdout == jobs
    assert not (tmp_path / "sweep" / "job.sh").exists()


def test_a_run_that_fails_fails_the_command_with_its_error(cluster: Cluster, tmp_path: Path) -> None:
    bad = ["reward=[python]", "reward.python.function=math:sqrt", "seed=0,1"]
    done = cluster.run(*GRPOCLI, *MULTIRUN, *SMALL, *bad, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"error: job \d+_0 \(.*/sweep/0\) ended as FAILED", last)
    assert "grpocli: error: " in last.partition("ended as")[2], "the run's own error"


def test_a_detached_run_survives_and_a_preempted_one_equals_an_uninterrupted_one(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    job = detached(cluster, tmp_path / "sweep", *LONG)
    wait_for_step(job, 7)
    urgent = cluster.run("sbatch", "--partition=urgent", "-N3", "--exclusive", "--wrap=sleep 2")
    assert urgent.returncode == 0, urgent.stderr
    job.until_over("COMPLETED", seconds=180)
    assert job.shown("Restarts") == "1"
    assert_same_run(job.run, uninterrupted)


def test_a_run_near_its_time_limit_equals_an_uninterrupted_one(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    """The test sends the signal of `--signal=B:USR1@...`, because SLURM sends it up to a minute early or late."""
    job = detached(cluster, tmp_path / "sweep", *LONG)
    wait_for_step(job, 7)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.until_over("COMPLETED", seconds=300)
    assert job.shown("Restarts") == "1"
    assert "asked to stop" in job.log
    assert_same_run(job.run, uninterrupted)


def test_a_cancelled_run_leaves_no_process(cluster: Cluster, tmp_path: Path) -> None:
    job = detached(cluster, tmp_path / "sweep", *LONG, "train.steps=1000")
    wait_for_step(job, 3)
    cluster.run("scancel", job.number)
    job.until_over("CANCELLED")
    assert [cluster.processes(node) for node in cluster.nodes] == [[], [], []]
    assert job.shown("Restarts") == "0"
