"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop a run after its step, with a checkpoint; a second Ctrl-C ends it at once.

The way of a signal through the code:

    signals.py              `stop_signal` catches it in the process that the user started; `StopSignal` remembers it
    launch/trainers.py      with several trainer processes, creates RUN/stop, since signals do not reach all of them
    training/trainer.py     asks after each step, writes a checkpoint and raises Stopped: exit code 3
    guard.py, reaper.py     end servers and trainer processes when the process that started them ends, even by SIGKILL
"""

from __future__ import annotations

import faulthandler
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

LOOK_SECONDS = 0.25
"""Seconds between checks for the stop file in `StopSignal.asked_lately`."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def enable_crash_tracebacks() -> None:
    """Make Python print its stack when native code crashes (a segmentation fault), which names the calling function."""
    if sys.__stderr__ and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)


@dataclass(slots=True)
class StopSignal:
    """Whether the run was asked to stop.

    received: the name of the first signal. file: a file whose existence asks too, for processes that get no signal.
    immediate: a signal raises KeyboardInterrupt, because there is no step to finish.
    looked, seen: when `asked_lately` last checked, and the result.
    """

    received: str | None = None
    file: Path | None = None
    immediate: bool = False
    looked: float = -math.inf
    seen: bool = False

    def asked(self) -> bool:
        return self.received is not None or (self.file is not None and self.file.exists())

    def asked_lately(self, clock: Callable[[], float] = time.monotonic) -> bool:
        """`asked`, but fast enough for every token: checks for the file, perhaps on a network, every `LOOK_SECONDS`."""
        if self.received is None and not self.seen and clock() - self.looked >= LOOK_SECONDS:
            self.looked, self.seen = clock(), self.asked()
        return self.received is not None or self.seen

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the process that the user started. Only a repeated SIGINT ends the run at once, because
        schedulers repeat their signals."""
        if self.immediate or (self.received is not None and number == signal.SIGINT):
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            print(
                f"\n{self.received}: stopping after this step, or at once in an evaluation, with a checkpoint; "
                "another Ctrl-C ends the run without one",
                file=sys.stderr,
            )

    def record(self, number: int, frame: FrameType | None) -> None:
        """The handler of one of several trainer processes: the launching process decides when to end it."""
        self.received = signal.Signals(number).name

    def listen(self) -> None:
        """Install `record` as the handler of the stopping signals."""
        for number in STOPPING:
            signal.signal(number, self.record)

    @contextmanager
    def immediately(self) -> Iterator[None]:
        """A block in which a signal raises KeyboardInterrupt: the engine's launch, with nothing to save yet."""
        self.immediate = True
        try:
            yield
        finally:
            self.immediate = False


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Catch the stopping signals within the block."""
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, stop.handle) for number in STOPPING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
