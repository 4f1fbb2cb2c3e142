"""Kills and signals: a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli.running import EVEN, SMALL, assert_close_metrics, assert_same_run, finish, metrics, run_here, start, wait_for
from cli.test_processes_run import TWO_MACHINES, machine
from replay.test_kinds_of_runs import assert_agrees, unchecked

pytestmark = [pytest.mark.processes, pytest.mark.survival]

LONG = ["train", *SMALL, *EVEN, "train.steps=8", "checkpoint.every=3", "eval.problems=0", "optim.warmup_steps=4"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(*LONG, f"hydra.run.dir={run}") == 0
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    assert all(row["grad_norm"] > 0 for row in metrics(run)), "a run that learns nothing cannot show a difference"
    return run


@pytest.mark.parametrize("reached", ["config.yaml", "checkpoints/step_000003"])
def test_kill_9_then_resume(reached: str, undisturbed: Path, tmp_path: Path) -> None:
    """A run without a checkpoint starts again."""
    run = tmp_path / "run"
    process = start(*LONG, f"hydra.run.dir={run}")
    wait_for(run / reached)
    process.kill()
    finish(process)
    assert not (run / "summary.json").exists()
    assert run_here("train", f"resume={run}") == 0
    assert_same_run(run, undisturbed)


def test_a_signal_stops_after_a_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LONG, "checkpoint.every=0", f"hydra.run.dir={run}")
    wait_for(run / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    _, out = finish(process, code=3)
    assert f"resume with: grpocli train resume={run}" in out
    steps = len(metrics(run))
    assert 1 <= steps < 8
    assert (run / "checkpoints" / f"step_{steps:06d}" / "trainer.json").exists()
    assert "SIGTERM" in json.loads((run / "summary.json").read_text())["exit"]
    assert run_here("train", f"resume={run}") == 0
    assert_same_run(run, undisturbed)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first steps of that run in two processes."""
    run = tmp_path_factory.mktemp("two") / "run"
    options = ["hardware.processes=2", "hardware.timeout=120"]
    assert run_here(*LONG, "train.steps=4", *options, f"hydra.run.dir={run}") == 0
    return run


def test_two_processes_equal_one(undisturbed: Path, two_processes: Path) -> None:
    assert_close_metrics(metrics(two_processes), metrics(undisturbed)[:4], rel=1e-3)
    assert (two_processes / "logs" / "rank_1.log").exists()


def test_a_run_of_two_processes_is_replayed_by_one(grpocli, two_processes: Path) -> None:
    assert unchecked(assert_agrees(grpocli, two_processes)) == {"they depend on the number of processes"}


def test_two_machines_equal_two_processes(two_processes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = machine(0, *LONG[1:], "train.steps=4", *TWO_MACHINES, f"hydra.run.dir={run}")
    wait_for(run / "job.json")
    second = machine(1, f"resume={run}")
    for process in (first, second):
        finish(process, code=0)
    assert_close_metrics(metrics(run), metrics(two_processes))
    assert (run / "logs" / "rank_1.log").exists()


def test_two_processes_stop_and_resume_together(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        *LONG, "hardware.processes=2", "hardware.parallel=fsdp2", "checkpoint.every=0", f"hydra.run.dir={run}"
    )
    wait_for(run / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    finish(process, code=3)
    assert run_here("train", f"resume={run}", "hardware.processes=1") == 0
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    last, expected = metrics(run)[-1], metrics(undisturbed)[-1]
    assert last["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
