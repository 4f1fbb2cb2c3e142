"""Doing something while something else is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Self, TypeVar

T = TypeVar("T")

END_WITHIN = 10.0
"""Seconds that whoever leaves early waits for the end of what was begun."""


class Meanwhile(Generic[T]):
    """Something that is done in a thread while something else is waited for. Leaving the block waits for its end."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name="meanwhile", daemon=True)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, who asks for the result is told
            self._future.set_exception(error)

    def result(self) -> T:
        """What it returned; raises what it raised."""
        return self._future.result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(END_WITHIN)  # a thread in the middle of a library's code would abort the interpreter's end
