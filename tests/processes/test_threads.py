"""A background task returns its result, raises its error, and is waited for at the end of its block."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest

from grpocli.errors import ConfigError
from grpocli.processes import threads
from grpocli.processes.threads import BackgroundTask, run_in_thread


def test_the_result_waits_for_the_task() -> None:
    go_on = threading.Event()

    def work() -> int:
        assert go_on.wait(30)
        return 7

    with BackgroundTask(work) as begun:
        go_on.set()
        assert begun.result() == 7


def test_the_result_raises_the_error_of_the_task_and_leaving_does_not() -> None:
    def work() -> None:
        raise ValueError("no data")

    with BackgroundTask(work):
        pass
    with BackgroundTask(work) as begun, pytest.raises(ValueError, match="no data"):
        begun.result()


def test_leaving_waits_for_the_thread_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "END_WITHIN", 0.2)
    stuck, over = threading.Event(), threading.Event()

    def work() -> None:
        stuck.wait(30)
        over.set()

    with pytest.raises(KeyError), BackgroundTask(work):
        raise KeyError
    assert not over.is_set()
    stuck.set()
    monkeypatch.setattr(threads, "END_WITHIN", 30)
    ended = threading.Event()

    def short() -> None:
        time.sleep(0.2)
        ended.set()

    with BackgroundTask(short):
        pass
    assert ended.is_set()


def test_an_error_in_the_background_is_seen_while_it_is_not_waited_for() -> None:
    go_on = threading.Event()

    def broken() -> None:
        go_on.wait(30)
        raise ConfigError("line 3 is not JSON", key="task.path")

    with BackgroundTask(broken) as task:
        task.check()
        go_on.set()
        wait([task._future])
        with pytest.raises(ConfigError) as told:
            task.check()
    assert told.value.key == "task.path"


def test_the_end_of_the_process_does_not_wait_for_a_thread() -> None:
    assert run_in_thread(lambda: threading.current_thread().daemon, "test").result(30)

    def fails() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run_in_thread(fails, "test").result(30)
