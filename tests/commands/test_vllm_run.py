"""Whole runs on a real vLLM server: the run's own, and one that `grpocli vllm-serve` started."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest
from commands.running import SMALL, finish, metrics, start

from grpocli.launch.guard import alive

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

RUN = ["train", *SMALL, "train.steps=5", "engine=vllm"]


def servers(marker: Path) -> list[int]:
    """Processes whose environment or command line names a folder of this test."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            text = (proc / "environ").read_bytes() + (proc / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended, or is not ours
        if str(marker).encode() in text and int(proc.name) != os.getpid() and alive(int(proc.name)):
            found.append(int(proc.name))
    return found


def assert_synced(run: Path) -> None:
    rows = metrics(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["token_mult_prob_error"] < 1.02 for row in rows)
    assert all(row["sync/bytes"] > 0 for row in rows[1:])


def test_a_run_starts_syncs_and_stops_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_TEST_MARK", str(tmp_path))
    code, out = finish(start(*RUN, f"hydra.run.dir={tmp_path}/run"))
    assert code == 0, out
    assert_synced(tmp_path / "run")
    assert servers(tmp_path) == []


def test_a_killed_run_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_TEST_MARK", str(tmp_path))
    process = start(*RUN, "train.steps=1000", f"hydra.run.dir={tmp_path}/run")
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "no step within 240 s"
        time.sleep(0.1)
    process.kill()
    finish(process)
    deadline = time.monotonic() + 30
    while servers(tmp_path):
        assert time.monotonic() < deadline, f"still running: {servers(tmp_path)}"
        time.sleep(0.2)


def test_two_processes_use_the_server_of_another_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_TEST_MARK", str(tmp_path))
    serve = start("vllm-serve", "model.warm_start_steps=20", "port=0", "max_model_len=64")
    try:
        url = None
        assert serve.stdout is not None
        for line in serve.stdout:
            if "vLLM serves at " in line:
                url = line.split()[-1]
            if "stop with Ctrl-C" in line:
                break
        assert url is not None, "vllm-serve ended without an address"
        code, out = finish(
            start(*RUN, f"engine.base_url={url}", "hardware.processes=2", f"hydra.run.dir={tmp_path}/run")
        )
        assert code == 0, out
        assert_synced(tmp_path / "run")
    finally:
        serve.send_signal(signal.SIGINT)
        code, out = finish(serve, timeout=60)
    assert code == 0, out
    assert servers(tmp_path) == []
