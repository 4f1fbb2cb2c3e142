"""Deadlines of calls in this process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from grpocli.processes import deadline as deadlines
from grpocli.processes.deadline import deadline, within


@pytest.mark.parametrize("work", [lambda: time.sleep(30), lambda: [None for _ in iter(int, 1)]])
def test_a_call_that_hangs_is_ended(work) -> None:
    with pytest.raises(TimeoutError, match="too slow"), deadline(0.2, "too slow"):
        work()


def test_a_call_may_use_its_own_alarms() -> None:
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    with deadline(20, "too slow"):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.2)
    signal.signal(signal.SIGALRM, before)
    assert rang == [True]


def elsewhere(call: Callable[[], object]) -> object:
    """The result of `call` in another thread, as when steps are sampled ahead."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(20)


@pytest.mark.parametrize("run", [lambda call: call(), elsewhere])
def test_a_deadline_holds_in_every_thread(run) -> None:
    assert run(lambda: within(20, "too slow", lambda: 3)) == 3
    with pytest.raises(TimeoutError, match="its own"):
        run(lambda: within(20, "too slow", raises))
    ended: list[None] = []
    with pytest.raises(TimeoutError, match="too slow"):
        run(lambda: within(0.2, "too slow", lambda: ended.append(time.sleep(2))))
    assert ended == []


def raises() -> None:
    raise TimeoutError("its own")


def test_a_signal_at_the_very_end_leaves_no_timer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remaining timer would end the process, since no handler is left for its signal."""
    libc, deleted = deadlines._timers(), []

    def delete(timer: object) -> None:
        signal.raise_signal(deadlines.EXPIRED)
        deleted.append(libc.timer_delete(timer))

    timers = SimpleNamespace(timer_create=libc.timer_create, timer_settime=libc.timer_settime, timer_delete=delete)
    monkeypatch.setattr(deadlines, "_timers", lambda: timers)
    with pytest.raises(TimeoutError, match="too slow"), deadline(0.05, "too slow"):
        time.sleep(30)
    assert deleted == [0]


CATASTROPHIC = "re.match('(a+)+$', 'a' * 60 + 'b')"
"""Practically endless, and holds the interpreter's lock."""


def ended(code: str) -> tuple[int, str]:
    """The exit code and the error output of a process in which a call hangs."""
    code = f"import re, threading\nfrom grpocli.processes import deadline\ndeadline.GRACE = 0.5\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "call",
    [
        f"def call(): {CATASTROPHIC}",
        f"def call():\n    for _ in range(20):\n        try: {CATASTROPHIC}\n        except Exception: pass",
        f"def call():\n    for _ in range(20):\n        try: {CATASTROPHIC}\n        except BaseException: pass",
    ],
)
def test_a_regular_expression_is_interrupted_even_if_it_catches_exceptions(call: str) -> None:
    code, said = ended(f"{call}\ndeadline.GRACE = 20\ndeadline.within(0.5, 'too slow', call, 'take another')")
    assert (code, said.splitlines()[-1]) == (1, "TimeoutError: too slow")


@pytest.mark.processes
@pytest.mark.parametrize(
    "run",
    [
        f"threading.Thread(target=deadline.within, args=(0.5, 'too slow', lambda: {CATASTROPHIC}, 'ask less')).start()",
        "deadline.within(0.5, 'too slow', lambda: sum(range(10**15)), 'ask less')",
    ],
)
def test_a_call_that_cannot_be_interrupted_ends_the_process_with_an_error(run: str) -> None:
    assert ended(run) == (1, "grpocli: error: too slow, and cannot be interrupted: ask less\n")
