"""Work in a thread returns its result or raises its error, and the end of the process does not wait for it."""

from __future__ import annotations

import threading

import pytest

from grpocli.processes.threads import run_in_thread


def test_the_end_of_the_process_does_not_wait_for_a_thread() -> None:
    assert run_in_thread(lambda: threading.current_thread().daemon, "test").result(30)

    def fails() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run_in_thread(fails, "test").result(30)
