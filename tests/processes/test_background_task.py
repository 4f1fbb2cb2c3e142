"""Something done in a thread while something else is waited for."""

from __future__ import annotations

import threading
import time

import pytest

from grpocli.processes import background_task
from grpocli.processes.background_task import Meanwhile


def test_it_is_done_meanwhile_and_its_result_waited_for() -> None:
    go_on = threading.Event()

    def work() -> int:
        assert go_on.wait(30)
        return 7

    with Meanwhile(work) as begun:
        go_on.set()
        assert begun.result() == 7


def test_who_asks_is_told_its_error_and_nobody_else() -> None:
    def work() -> None:
        raise ValueError("no data")

    with Meanwhile(work):
        pass
    with Meanwhile(work) as begun, pytest.raises(ValueError, match="no data"):
        begun.result()


def test_leaving_waits_for_its_end_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_task, "END_WITHIN", 0.2)
    stuck, over = threading.Event(), threading.Event()

    def work() -> None:
        stuck.wait(30)
        over.set()

    with pytest.raises(KeyError), Meanwhile(work):
        raise KeyError
    assert not over.is_set()
    stuck.set()
    monkeypatch.setattr(background_task, "END_WITHIN", 30)
    ended = threading.Event()

    def short() -> None:
        time.sleep(0.2)
        ended.set()

    with Meanwhile(short):
        pass
    assert ended.is_set()
