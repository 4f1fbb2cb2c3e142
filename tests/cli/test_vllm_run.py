"""Whole runs on the run's own real vLLM server."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli.family import Family, wait_for_steps
from cli.running import SMALL, finish, metrics, start
from cli.test_environment_run import TWO

from grpocli.runs.rollouts import read_rollouts

pytestmark = pytest.mark.vllm

RUN = ["train", *SMALL, "train.steps=1000", "engine=vllm"]


def assert_synced(run: Path) -> None:
    rows = metrics(run)
    assert len(rows) >= 3
    assert [row["step"] for row in rows] == [row["weight_version"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["token_mult_prob_error"] < 1.02 for row in rows)
    assert all(row["sync/bytes"] > 0 for row in rows[1:])


def assert_replays(grpocli, run: Path) -> None:
    """Asserts that a replay of every step agrees."""
    code, out, _ = grpocli("replay", str(run), "--step", ":", "--json")
    steps = json.loads(out)["steps"]
    assert code == 0, [check for step in steps for check in step["checks"] if check["differ"]]
    assert [step["step"] for step in steps] == [row["step"] for row in metrics(run)]
    assert all(step["exact"] for step in steps)


def until_signal(run: Path, steps: int, number: signal.Signals, *options: str) -> int:
    """Starts a long run and sends it a signal after some steps.

    Returns its exit code and asserts that no process is left.
    """
    family = Family()
    process = start(*RUN, *options, f"hydra.run.dir={run}")
    try:
        wait_for_steps(run, steps, process)
        assert len(family.engines()) == 1
        memory = family.memory()
        process.send_signal(number)
        code, _ = family.wait(process, 60)
    finally:
        process.kill()
        finish(process)
    family.assert_gone(memory)
    return code


@pytest.mark.survival
def test_a_run_starts_syncs_and_stops_its_server(grpocli, tmp_path: Path) -> None:
    """One task has one turn and another several; the trainer scores the sampled tokens of both."""
    code = until_signal(tmp_path / "run", 3, signal.SIGTERM, *TWO[1:])
    assert code == 3, "it stops after a step, with a checkpoint"
    assert_synced(tmp_path / "run")
    assert all(row["completions/mean_turns"] > 1 for row in metrics(tmp_path / "run"))
    assert_replays(grpocli, tmp_path / "run")


@pytest.mark.survival
def test_weights_change_under_running_requests_and_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    """Timing decides whether a sync meets a running request; test_real_vllm_server.py makes sure of one."""
    run = tmp_path / "run"
    options = ["rollout.max_staleness=1", "rollout.in_flight=true", "eval.problems=0", "model.warm_start_steps=1"]
    options += ["rollout.max_completion_tokens=50", "engine.vllm_args.max_num_seqs=4"]
    assert until_signal(run, 3, signal.SIGKILL, *options) == -signal.SIGKILL
    rows = metrics(run)
    assert [row["weight_version"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(row["staleness/max"] for row in rows) == 1
    assert {row["clip_ratio/region_mean"] for row in rows} == {0}, "old log-probs are the trainer's own"
    for step in range(1, 4):
        for row in read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet"):
            spans = row["version_spans"] or [[row["version"], len(row["completion_ids"])]]
            assert sum(tokens for _, tokens in spans) == len(row["completion_ids"])
            assert [version for version, _ in spans] in ([step - 1], [step], [step - 1, step])
            assert row["version"] == spans[0][0]
