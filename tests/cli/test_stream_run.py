"""Whole runs whose rollouts are a stream, on an engine without a server: exact resumes, processes, errors, signals."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cli.copied import config_dir
from cli.running import EVEN, assert_same_run, finish, killed_after, metrics, run_here, start, wait_for, without_times

from grpocli.runs.rollouts import read_rollouts
from grpocli.training.stream import STREAM_FILE

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
PROCESSES = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.survival)])
EXACT = ["rollout.max_staleness=1", "rollout.in_flight=false"]
RUN = ["train", "model.warm_start_steps=20", "rollout.prompts_per_step=4", "rollout.group_size=4", "optim.lr=3e-3"]
RUN += ["eval.problems=0", "checkpoint.every=2", "checkpoint.keep=0"]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return config_dir(tmp_path / "conf")


def trained(run: Path, *options: str) -> list[dict[str, Any]]:
    assert run_here(*RUN, *options, f"hydra.run.dir={run}") == 0
    return metrics(run)


def versions(run: Path, step: int) -> set[int]:
    return {row["version"] for row in read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")}


def test_staleness_0_equals_the_trainers_own_model(engine: list[str], tmp_path: Path) -> None:
    rows = trained(tmp_path / "copied", *engine, "train.steps=3")
    assert not [name for name in rows[0] if name.startswith(("staleness/", "stream/"))]
    trained(tmp_path / "own", "engine=transformers", "train.steps=3")
    own, copied = metrics(tmp_path / "own"), [{k: v for k, v in row.items() if k != "sync/bytes"} for row in rows]
    assert without_times(own) == without_times(copied)
    assert [versions(tmp_path / "copied", step) for step in (1, 2, 3)] == [{1}, {2}, {3}]


def test_staleness_1_is_one_version_old_and_a_resume_repeats_it_to_the_bit(engine: list[str], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    options = [*engine, *EVEN, *EXACT, "train.steps=8", "eval.problems=4", "eval.every=3"]
    rows = trained(whole, *options)
    assert all(row["grad_norm"] > 0 for row in rows), "without updates the age shows nothing"
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert [versions(whole, step) for step in range(1, 9)] == [{1}, {1}, {2}, {3}, {4}, {5}, {6}, {7}]
    assert max(abs(row["sampling_importance_ratio"] - 1) for row in rows[1:]) > 1e-4
    assert {row["clip_ratio/region_mean"] for row in rows} == {0}, "the first update of a step is on-policy"
    saved = json.loads((whole / "checkpoints" / "step_000004" / STREAM_FILE).read_text())
    assert (len(saved["ended"]), saved["running"]) == (4, [])
    assert not (whole / "checkpoints" / "step_000008" / STREAM_FILE).exists(), "no step follows the last one"

    killed = killed_after(4, whole, tmp_path / "killed")
    assert run_here("train", *engine[:2], f"resume={killed}") == 0
    assert_same_run(killed, whole)
    for path in sorted((whole / "rollouts").iterdir()):
        assert read_rollouts(path) == read_rollouts(killed / "rollouts" / path.name)


@pytest.mark.survival
def test_kill_9_while_groups_are_sampled_then_resume(engine: list[str], tmp_path: Path) -> None:
    """Also of groups that dynamic sampling discards, which are saved with the step that is ready."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = [*engine, *EVEN, *EXACT, "train.steps=8", "algorithm=dapo", "algorithm.keep.surplus=discard"]
    trained(whole, *options)
    process = start(*RUN, *options, "engine.slow=0.1", f"hydra.run.dir={killed}")
    wait_for(killed / "checkpoints" / "step_000004")
    process.kill()
    finish(process)
    assert run_here("train", *engine[:2], f"resume={killed}", "engine.slow=0") == 0
    assert_same_run(killed, whole)
    kept = [[read_rollouts(path) for path in sorted((run / "rollouts").iterdir())] for run in (whole, killed)]
    assert kept[0] == kept[1]
    assert any(row["status"] == "filtered" for step in kept[0] for row in step)


@pytest.mark.survival
@pytest.mark.parametrize("staleness", [1, 2])
def test_two_processes_sample_the_same(engine: list[str], staleness: int, tmp_path: Path) -> None:
    """Only the main process asks the engine; without `in_flight` no clock decides which weights sample."""
    options = [*engine, *EXACT, f"rollout.max_staleness={staleness}", "train.steps=6", "eval.problems=4"]
    options += ["eval.every=2", "hardware.timeout=60", "engine.slow=0.05"]
    rows = trained(tmp_path / "two", *options, "hardware.processes=2")
    assert max(row["staleness/max"] for row in rows) == staleness
    assert {row["sampling/kept"] for row in rows} == {4}
    alone = trained(tmp_path / "one", *options)
    assert [row["reward"] for row in rows] == [row["reward"] for row in alone]
    two, one = ([versions(tmp_path / name, s) for s in range(1, 7)] for name in ("two", "one"))
    assert two == one


def test_training_and_sampling_overlap(engine: list[str], tmp_path: Path) -> None:
    """The engine answers only after the policy has changed, so the run ends only if both overlap."""
    options = ["engine.meanwhile=5", "rollout.max_staleness=1", "train.steps=4"]
    options += ["optim.weight_decay=0.1"]  # weights change even if all rewards are equal
    rows = trained(tmp_path / "run", *engine, *options)
    assert [row["staleness/max"] for row in rows][:2] == [0, 1]


@PROCESSES
def test_an_engine_lost_during_a_step_is_synced_again(engine: list[str], processes: int, tmp_path: Path) -> None:
    """The main threads sync it between two steps, or while they wait for the rest of a batch."""
    options = [*engine, *EXACT, "engine.lost=6", "train.steps=4"]
    rows = trained(tmp_path / "run", *options, f"hardware.processes={processes}")
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert versions(tmp_path / "run", 2) <= {1, 2}


@PROCESSES
def test_an_unavailable_engine_ends_the_run_with_a_checkpoint(
    grpocli, engine: list[str], processes: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [*engine, *EXACT, "engine.lost=16", "engine.gone=true", "train.steps=9"]
    code, _, err = grpocli(*RUN, *options, f"hardware.processes={processes}", f"hydra.run.dir={run}")
    assert code == 3
    assert err.splitlines()[-1].startswith("grpocli: stopped: the engine stays away; stopped after step 3, ")
    assert len(metrics(run)) == 3
    assert (run / "checkpoints" / "step_000003").exists()


@PROCESSES
def test_a_broken_engine_ends_the_run_with_its_error(
    grpocli, engine: list[str], processes: int, tmp_path: Path
) -> None:
    """It breaks in the main process, for which the others wait."""
    options = [*engine, *EXACT, "train.steps=9", "engine.fails=10", f"hardware.processes={processes}"]
    code, _, err = grpocli(*RUN, *options, "hardware.timeout=900", f"hydra.run.dir={tmp_path}/run")
    assert code == 1
    assert err.splitlines()[-1].startswith("grpocli: error: RuntimeError: the engine broke")
    assert processes > 1 or "Traceback" not in err  # torch's launcher shows only one of several errors
    assert len(metrics(tmp_path / "run")) >= 1


@pytest.mark.survival
def test_a_signal_ends_the_run_after_a_checkpoint_and_a_second_one_at_once(engine: list[str], tmp_path: Path) -> None:
    for signals, code in ((1, 3), (2, 1)):
        run = tmp_path / f"{signals}"
        options = [*engine, *EXACT, "train.steps=999"]
        options += ["engine.slow=0.2"] if signals == 1 else ["engine.stuck=7"]
        process = start(*RUN, *options, f"hydra.run.dir={run}")
        wait_for(run / "metrics.jsonl")
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        got, out = finish(process, timeout=30)
        assert got == code, out
        assert "Traceback" not in out
    assert (tmp_path / "1" / "checkpoints").exists()
