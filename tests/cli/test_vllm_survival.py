"""Servers killed during a run: its own are restarted; a lost external one ends the run with a checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cli.family import Family, wait_for_steps, wait_gone
from cli.running import SMALL, finish, metrics, run_here, start
from cli.test_vllm_run import assert_synced

from grpocli.rollout.vllm.server_files import sweep

pytestmark = [pytest.mark.vllm, pytest.mark.survival]

RUN = ["train", *SMALL, "engine=vllm", "eval.problems=0"]


def test_killed_servers_are_replaced(tmp_path: Path) -> None:
    """Both servers of a stream, whose groups wait for them; test_vllm_server_pool.py loses one of two."""
    family, run, steps = Family(), tmp_path / "run", 6
    options = ["engine.replicas=2", "rollout.max_staleness=2", f"train.steps={steps}"]
    process = start(*RUN, *options, f"hydra.run.dir={run}")
    try:
        wait_for_steps(run, 2, process)
        engines = family.engines()
        assert len(engines) == 2
        memory = family.memory()
        for engine in engines:
            os.kill(engine, signal.SIGKILL)
        code, out = family.wait(process)
    finally:
        process.kill()
        finish(process)
    assert code == 0, out
    rows = metrics(run)
    assert len(rows) == steps
    assert_synced(run)
    assert {row["sampling/kept"] for row in rows} == {4}
    assert rows[-1]["engine/restarts"] == 2
    family.assert_gone(memory)


def test_two_sharded_processes_use_the_server_of_another_terminal_until_it_is_lost(tmp_path: Path) -> None:
    """The loss ends the run with a checkpoint. The test kills the server and its guard, so that nothing ends vLLM's
    processes and removes their files.
    """
    family, servers, run = Family(), Family(), tmp_path / "run"
    serve = start("vllm-serve", "model.warm_start_steps=20", "port=0", "engine.max_model_len=64")
    try:
        assert serve.stdout is not None
        url = next(line.split()[-1] for line in serve.stdout if "vLLM serves at " in line)
        assert len(servers.engines()) == 1
        given = [f"engine.base_url=[{url}]", "engine.reconnect_timeout=3"]
        given += ["hardware.processes=2", "hardware.parallel=fsdp2"]
        process = start(*RUN, *given, "train.steps=200", "checkpoint.every=0", f"hydra.run.dir={run}")
        wait_for_steps(run, 3, process)
        assert len(family.engines()) == 1
        memory = family.memory()
        servers.kill_named(serve)
        assert wait_gone(sorted(servers.seen), 10) == []
    finally:
        serve.kill()
        finish(serve)
    try:
        code, out = family.wait(process, 60)
    finally:
        process.kill()
        finish(process)
    assert code == 3, out
    said = " ".join(out.split())
    assert "no server came in its place within 3 s (engine.reconnect_timeout)" in said
    assert f"resume with: grpocli train resume={run}" in said
    rows = metrics(run)
    done = len(rows)
    assert 3 <= done < 200
    assert_synced(run)
    assert {row["sampling/kept"] for row in rows} == {4}
    assert json.loads((run / "checkpoints" / f"step_{done:06d}" / "trainer.json").read_text())["step"] == done
    sweep()  # as the next start does
    family.assert_gone(memory)
    more = ["engine=transformers", "hardware.processes=1", f"train.steps={done + 2}"]
    assert run_here("train", f"resume={run}", *more) == 0
    assert [row["step"] for row in metrics(run)] == list(range(1, done + 3))
