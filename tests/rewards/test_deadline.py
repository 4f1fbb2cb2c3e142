"""The deadline of a call that cannot be moved to another thread or process."""

from __future__ import annotations

import signal
import time

import pytest

from grpocli.rewards.deadline import deadline


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
