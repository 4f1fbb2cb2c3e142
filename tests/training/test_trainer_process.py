"""Errors of a trainer process: the first one counts, and a full disk is found behind a library's error."""

from __future__ import annotations

import pytest

from grpocli.launch.trainer_process import close_all


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
