"""Whole runs on a real cluster: submitted, waited for or detached, preempted, ended by their time limit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli.running import EVEN, metrics, without_times
from safetensors.torch import load_file
from slurm.cluster import Cluster
from slurm.submitting import GRPOCLI, MULTIRUN, detached, wait_for_step

pytestmark = pytest.mark.slurm
SMALL = ["engine=transformers", "model.warm_start_steps=20", "rollout.prompts_per_step=4", "rollout.group_size=4"]
SMALL += ["eval.problems=4", "eval.samples=2"]
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


def test_what_sbatch_refuses_leaves_no_run(cluster: Cluster, tmp_path: Path) -> None:
    jobs = cluster.run("squeue", "--noheader", "--states=all").stdout
    sweep = tmp_path / "sweep"
    done = cluster.run(*GRPOCLI, *MULTIRUN, *SMALL, "hydra.launcher.partition=gpu", f"hydra.sweep.dir={sweep}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "sbatch failed: " in done.stderr
    assert "invalid partition" in done.stderr
    assert cluster.run("squeue", "--noheader", "--states=all").stdout == jobs
    assert not (sweep / "0").exists()


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
