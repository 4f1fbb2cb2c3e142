"""Checkpoints are written while the next rollouts are sampled, and are complete before the next update."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli.running import SMALL, metrics

from grpocli.rollout.transformers_engine import TransformersEngine
from grpocli.training import checkpoint
from grpocli.training.checkpoint import Checkpointer


def saver(whole: bool = True) -> Checkpointer:
    world: Any = SimpleNamespace(channel=lambda: nullcontext, parallel=SimpleNamespace(replicated=whole))
    return Checkpointer(cast("Any", None), 0, cast("Any", None), world)


def broken() -> None:
    raise OSError(errno.ENOSPC, "full")


WAIT = 60.0
"""Seconds, far more than any test here takes."""
RUN = ["train", *SMALL, "train.steps=3", "checkpoint.every=1", "eval.problems=0"]


def test_sharded_weights_are_written_in_the_callers_thread() -> None:
    here: list[threading.Thread] = []
    saver(whole=False).start(lambda: here.append(threading.current_thread()))
    assert here == [threading.current_thread()]


@pytest.mark.processes
def test_rollouts_are_sampled_while_a_checkpoint_is_written(grpocli, tmp_path: Path, monkeypatch) -> None:
    sampling, overlapped = threading.Event(), []
    save, generate = checkpoint.save, TransformersEngine.generate

    def held(path: Path, state: checkpoint.State, *rest: Any) -> None:
        if state.step == 1:
            overlapped.append(sampling.wait(WAIT))
        save(path, state, *rest)

    def observed(*args: Any) -> Any:
        found = generate(*args)
        if (tmp_path / "run" / "metrics.jsonl").exists():
            sampling.set()
        return found

    monkeypatch.setattr(checkpoint, "save", held)
    monkeypatch.setattr(TransformersEngine, "generate", observed)
    grpocli(*RUN, f"hydra.run.dir={tmp_path / 'run'}", code=0)
    assert overlapped == [True]
    assert all((tmp_path / "run" / "checkpoints" / f"step_{k:06d}" / "trainer.json").exists() for k in (2, 3))
    rows = metrics(tmp_path / "run")
    assert ["time/checkpoint" in row for row in rows] == [False, True, True]


@pytest.mark.slow
def test_a_full_disk_ends_the_run_before_another_update(grpocli, tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, *rest: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint, "save", full)
    assert "no space left on the disk" in grpocli(*RUN, f"hydra.run.dir={tmp_path / 'run'}", code=1)[2]
    assert len(metrics(tmp_path / "run")) == 1


def test_a_checkpoint_is_written_in_the_background() -> None:
    """Its error is raised once by `wait`, or when the next one starts, and only logged at the end of the run."""
    go, done, one = threading.Event(), [], saver()
    one.start(lambda: (go.wait(WAIT), done.append(1)))
    assert one.writing
    assert not done
    go.set()
    one.wait()
    assert (one.writing, done) == (False, [1])
    one.start(broken)
    with pytest.raises(OSError, match="full"):
        one.wait()
    one.wait()
    one.start(broken)
    with pytest.raises(OSError, match="full"):
        one.start(lambda: None)
    one.start(broken)
    one.close()


@pytest.mark.processes
def test_a_process_that_abandons_a_checkpoint_exits_without_an_abort() -> None:
    """Python's finalization aborts a process whose daemon thread runs C++ code."""
    code = """
import threading
import torch
from training.test_checkpointer import saver
from grpocli.processes.threads import end_process
one = saver()
begun = threading.Event()
def work():
    begun.set()
    while True:
        torch.ones(400, 400) @ torch.ones(400, 400)
one.start(work)
begun.wait()
one.close(wait=False)
print("ended")
end_process(1)
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stdout) == (1, "ended\n"), done.stderr
    assert "Fatal Python error" not in done.stderr
