"""Errors of a trainer process: the first one counts, a full disk is found behind a library's error, and a run whose
engine is lost for good stops with a checkpoint, with all finished steps logged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from grpocli.errors import EngineGone, ServiceGone, Stopped
from grpocli.launch.trainer_process import as_grpo_error, close_all
from grpocli.runs.run_dir import RunDir
from grpocli.training.trainer import Trainer


def raising(error: Exception, closed: list[str]) -> None:
    closed.append(str(error))
    raise error


def test_everything_is_closed_and_the_first_error_counts() -> None:
    closed: list[str] = []
    closes = [lambda: raising(OSError("log"), closed), lambda: raising(ValueError("world"), closed)]
    with pytest.raises(OSError, match="log"):
        close_all(*closes)
    assert closed == ["log", "world"]

    def fail() -> None:
        try:
            raise RuntimeError("the cause")
        finally:
            close_all(*closes)

    with pytest.raises(RuntimeError, match="the cause"):
        fail()
    assert closed == ["log", "world"] * 2


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_a_full_disk_behind_another_error_is_reported(tmp_path: Path, link: str) -> None:
    run = RunDir(tmp_path)
    run.config.touch()
    error = RuntimeError("the writer failed")
    assert "RuntimeError: the writer failed" in str(as_grpo_error(error, run))
    setattr(error, link, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.metrics)))
    error.__suppress_context__ = False
    assert "no space left on the disk" in str(as_grpo_error(error, run))


class Ended:
    """A trainer of three steps that records its calls; the service is lost in the call `gone`."""

    def __init__(self, gone: tuple[str, int]) -> None:
        self.gone, self.steps, self.done_calls = gone, 0, list[tuple[str, int]]()
        self.metrics: dict[str, Any] = {}
        self.groups, self.engine_version = list[Any](), 1
        self.collector = SimpleNamespace(advantages=lambda groups: torch.zeros(0, 1))
        every, train, algorithm = SimpleNamespace(every=1), SimpleNamespace(steps=3), SimpleNamespace(supervised=False)
        self.run = SimpleNamespace(seed=0, train=train, eval=every, checkpoint=every, algorithm=algorithm)
        self.state, self.world = SimpleNamespace(step=0), SimpleNamespace(rank=0, enter=lambda *_: None)

    train, step = Trainer.train, Trainer.step

    def __getattr__(self, verb: str) -> Any:
        def call(*_: Any) -> Any:
            if (verb, self.steps) == self.gone:
                raise EngineGone("the server stays away")
            self.steps += verb == "update"
            self.state.step = self.steps
            self.done_calls.append((verb, self.steps))
            return {"due": True, "finish": {}, "ends_early": False}.get(verb, self)

        return call

    def checkpoint_and_stop(self, gone: ServiceGone | None = None) -> NoReturn:
        self.done_calls.append(("saved", self.steps))
        raise Stopped(str(gone))


@pytest.mark.parametrize(
    "gone",
    [("evaluate_at_start", 0), ("generate_and_score", 1), ("evaluate_if_due", 2), ("checkpoint", 2), ("finish", 3)],
)
def test_finished_steps_are_logged_and_saved_wherever_the_engine_is_lost(gone: tuple[str, int]) -> None:
    trainer = Ended(gone)
    with pytest.raises(Stopped, match="stays away"):
        trainer.train()
    assert [step for verb, step in trainer.done_calls if verb == "log"] == list(range(1, gone[1] + 1))
    assert trainer.done_calls[-1] == ("saved", gone[1])
