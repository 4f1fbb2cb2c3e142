"""Errors of a trainer process: the first one counts, and a full disk is found behind a library's error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from grpocli.launch.trainer_process import as_grpo_error, close_all
from grpocli.runs.run_dir import RunDir


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
