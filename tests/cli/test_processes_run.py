"""Several trainer processes: one hangs, one is killed, and processes on several machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli.family import wait_gone
from cli.running import EVEN, SMALL, assert_close_metrics, finish, metrics, run_here, start, wait_for

from grpocli.processes.reports import JOINING, heartbeats

pytestmark = pytest.mark.processes

REWARD = """
import os, time

CALLS = 0

def score(completions, **kwargs):
    global CALLS
    CALLS += 1
    if CALLS > 2 and os.environ.get("RANK") == "1":
        {then}
    return [float(i % 2) for i in range(len(completions))]
"""
TWO_MACHINES = ["hardware=multinode", "hardware.train_nodes=2", "hardware.rollout_nodes=0", "hardware.parallel=ddp"]
TWO_MACHINES += ["hardware.devices_per_node=1", "hardware.device=cpu"]


def run_with_reward(tmp_path: Path, then: str, *options: str) -> list[str]:
    (tmp_path / "reward.py").write_text(REWARD.format(then=then))
    reward = ["reward=[python]", "reward.python.function=reward.py:score", "reward.python.timeout=600"]
    return ["train", *SMALL, *reward, "eval.problems=0", "train.steps=500", *options, f"hydra.run.dir={tmp_path}/run"]


@pytest.mark.survival
def test_a_hanging_process_is_named_with_its_stage_at_the_timeout(tmp_path: Path) -> None:
    options = ["hardware.processes=2", "hardware.timeout=10"]
    _, out = finish(start(*run_with_reward(tmp_path, "time.sleep(10_000)", *options)), timeout=240, code=1)
    assert "process 1 (pid " in out.splitlines()[-1]
    assert (
        "did not arrive within hardware.timeout=10 s: it has been at 'reward.python' of step 3" in out.splitlines()[-1]
    )
    assert "did not arrive" in json.loads((tmp_path / "run" / "summary.json").read_text())["exit"]
    assert "Traceback" not in out
    assert wait_gone([beat.pid for beat in heartbeats(tmp_path / "run")], 20) == []


@pytest.mark.survival
def test_a_killed_process_ends_the_others_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = start(*run_with_reward(tmp_path, "pass", "hardware.processes=2"))
    wait_for(tmp_path / "run" / "metrics.jsonl")
    _, victim = heartbeats(tmp_path / "run")
    os.kill(victim.pid, signal.SIGKILL)
    _, out = finish(process, timeout=180, code=1)
    assert f"process 1 (pid {victim.pid}) ended without an error message at" in out.splitlines()[-1]
    assert "Traceback" not in out
    assert "ChildFailedError" not in out
    assert list(temporary.glob("torchelastic_*")) == []


@pytest.mark.survival
@pytest.mark.parametrize("killed", ["reaper.py trainers", "grpocli.launch.trainer_launcher"])
def test_no_process_outlives_its_guard_or_launcher(tmp_path: Path, killed: str) -> None:
    process = start(*run_with_reward(tmp_path, "pass", "hardware.processes=2"))
    wait_for(tmp_path / "run" / "metrics.jsonl")
    found = subprocess.run(["pgrep", "-f", f"{killed}.*{tmp_path}"], capture_output=True, text=True, check=True)
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
    _, out = finish(process, timeout=180, code=1)
    assert "kill" in out.splitlines()[-1]
    assert wait_gone([beat.pid for beat in heartbeats(tmp_path / "run")], 5) == []


def machine(rank: int, *argv: str, session: str = "77", count: int = 2) -> subprocess.Popen[str]:
    """A training machine of a job, started as by the batch script; this machine stands for several."""
    job = {"SLURM_JOB_ID": session, "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(count)}
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(21000 + os.getpid() % 9000)}
    return start("train", *argv, **job, **port)


@pytest.mark.survival
def test_an_error_on_the_other_machine_ends_the_run(tmp_path: Path) -> None:
    words = run_with_reward(tmp_path, "raise ValueError('the second machine is unhappy')", *TWO_MACHINES)
    first = machine(0, *words[1:])
    wait_for(tmp_path / "run" / "job.json")
    second = machine(1, f"resume={tmp_path}/run")
    for process in (first, second):
        _, out = finish(process, timeout=120, code=1)
        assert "the second machine is unhappy" in out.splitlines()[-1]


STOPS = """
from pathlib import Path

def score(completions, **kwargs):
    Path(__file__).with_name("run").joinpath("stop").touch()  # as a batch script asks
    return [float(i % 2) for i in range(len(completions))]
"""


def test_a_run_that_a_batch_script_stops_asks_for_a_resume(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(STOPS)
    run = tmp_path / "run"
    assert run_here("train", *SMALL, "reward=[reward.py:score]", "eval.problems=0", f"hydra.run.dir={run}") == 3
    assert len(metrics(run)) == 1
    assert (run / "again").exists()
    assert run_here("train", f"resume={run}", "train.steps=1") == 0
    assert not (run / "again").exists()
    assert not (run / "stop").exists()


def test_variables_left_over_from_a_launcher_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With them a run of one process would wait for a second one."""
    left = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}
    for name, value in left.items() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}.items():
        monkeypatch.setenv(name, value)
    assert run_here("train", *SMALL, "train.steps=1", f"hydra.run.dir={tmp_path}/run") == 0
    assert not left.keys() & os.environ.keys()


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, grpocli) -> None:
    """Each of its processes would train alone."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "hardware.processes=2" in grpocli("train", *SMALL, code=2)[2]


@pytest.mark.survival
def test_a_signal_ends_processes_that_wait_for_another_machine(tmp_path: Path) -> None:
    """They wait outside of Python, and nobody comes."""
    alone = machine(0, *SMALL, *TWO_MACHINES, f"hydra.run.dir={tmp_path}/run")
    wait_for(tmp_path / "run" / "accelerate_0.json")
    alone.send_signal(signal.SIGHUP)
    _, out = finish(alone, timeout=30, code=3)
    assert "SIGHUP before the first step" in out.splitlines()[-1]


@pytest.mark.survival
def test_a_signal_ends_processes_whose_first_collective_call_hangs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    two = start("train", *SMALL, "hardware.processes=2", f"hydra.run.dir={run}")
    wait_for(run / "logs" / "rank_1.json")
    while not (found := [beat for beat in heartbeats(run) if beat.rank and beat.stage == JOINING]):
        assert two.poll() is None
        time.sleep(0.005)
    os.kill(found[0].pid, signal.SIGSTOP)
    two.send_signal(signal.SIGTERM)
    _, out = finish(two, timeout=30, code=3)
    assert "SIGTERM before the first step" in out.splitlines()[-1]


@pytest.mark.survival
def test_processes_that_share_micro_batches_equal_one(tmp_path: Path) -> None:
    """Also after a resume in one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*SMALL, *EVEN, "train.minibatches=2", "train.micro_batch_tokens=100", "eval.problems=0"]
    shared = ["hardware.processes=2", "hardware.context_parallel=2", "train.steps=2", "hardware.timeout=120"]
    assert run_here("train", *options, f"hydra.run.dir={one}") == 0
    assert run_here("train", *options, *shared, f"hydra.run.dir={two}") == 0
    alone = ["hardware.processes=1", "hardware.context_parallel=1", "train.steps=3"]
    assert run_here("train", f"resume={two}", *alone) == 0
    assert any(row["loss"] for row in metrics(one))
    assert_close_metrics(metrics(one), metrics(two))
