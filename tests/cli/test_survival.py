"""Kills and signals: a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli.running import EVEN, SMALL, assert_close_metrics, assert_same_run, finish, metrics, run_here, start, wait_for

pytestmark = pytest.mark.survival

LONG = ["train", *SMALL, *EVEN, "train.steps=8", "checkpoint.every=3", "eval.problems=0", "optim.warmup_steps=4"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(*LONG, f"hydra.run.dir={run}") == 0
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    assert all(row["grad_norm"] > 0 for row in metrics(run)), "a run that learns nothing cannot show a difference"
    return run


def test_kill_9_then_resume(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LONG, f"hydra.run.dir={run}")
    wait_for(run / "checkpoints" / "step_000003")
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


def test_a_run_without_a_checkpoint_starts_again(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LONG, f"hydra.run.dir={run}")
    wait_for(run / "config.yaml")
    process.kill()
    finish(process)
    assert run_here("train", f"resume={run}") == 0
    assert_same_run(run, undisturbed)


def test_two_processes_equal_one(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["hardware.processes=2", "hardware.timeout=120"]
    assert run_here(*LONG, "train.steps=4", *options, f"hydra.run.dir={run}") == 0
    assert_close_metrics(metrics(run), metrics(undisturbed)[:4], rel=1e-3)
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
