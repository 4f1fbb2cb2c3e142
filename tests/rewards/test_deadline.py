"""The deadline of a call that cannot be moved to another thread or process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpocli.rewards.deadline import deadline, within


@pytest.mark.parametrize("work", [lambda: time.sleep(30), lambda: [None for _ in iter(int, 1)]])
def test_a_call_that_hangs_is_ended(work) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="too slow"), deadline(0.2, "too slow"):
        work()
    assert time.monotonic() - start < 5


def test_a_call_in_time_may_use_alarms_of_its_own() -> None:
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    with deadline(20, "too slow"):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.2)
    signal.signal(signal.SIGALRM, before)
    assert rang == [True]


def elsewhere(call: Callable[[], object]) -> object:
    """What `call` returns or raises in a thread, as where rollouts are collected ahead."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(20)


@pytest.mark.parametrize("run", [lambda call: call(), elsewhere])
def test_a_deadline_holds_in_every_thread(run) -> None:
    assert run(lambda: within(20, "too slow", lambda: 3)) == 3
    with pytest.raises(TimeoutError, match="its own"):
        run(lambda: within(20, "too slow", raises))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="too slow"):
        run(lambda: within(0.2, "too slow", lambda: time.sleep(2)))
    assert time.monotonic() - start < 1.5


def raises() -> None:
    raise TimeoutError("its own")
