"""Checkpoints are written while the next rollouts are sampled, and are complete before the next update."""

from __future__ import annotations

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

WAIT = 60.0
"""Seconds, far more than any test here takes."""
RUN = ["train", *SMALL, "train.steps=3", "checkpoint.every=1", "eval.problems=0"]


def test_sharded_weights_are_written_in_the_callers_thread() -> None:
    here, none = [], cast("Any", None)
    world: Any = SimpleNamespace(channel=lambda: nullcontext, parallel=SimpleNamespace(replicated=False))
    Checkpointer(none, 0, none, world).start(lambda: here.append(threading.current_thread()))
    assert here == [threading.current_thread()]


@pytest.mark.processes
def test_rollouts_are_sampled_while_a_checkpoint_is_written(
    grpocli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    code, _, err = grpocli(*RUN, f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert overlapped == [True]
    assert all((tmp_path / "run" / "checkpoints" / f"step_{k:06d}" / "trainer.json").exists() for k in (2, 3))
    rows = metrics(tmp_path / "run")
    assert ["time/checkpoint" in row for row in rows] == [False, True, True]
