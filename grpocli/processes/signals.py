"""SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask a run to stop after its step; a second SIGINT ends it at once."""

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
"""Between two looks for the stop file in `StopSignal.asked_lately`."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def crash_loudly() -> None:
    """Where a library crashes (a segmentation fault), Python says in which function, a reward's for example."""
    if sys.__stderr__ and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)


@dataclass(slots=True)
class StopSignal:
    """Whether the run was asked to stop. file: its existence asks too (for processes that get no signal).

    no_step: there is no step to finish, so a signal ends whatever is being waited for. looked: when `asked_lately` last
    looked for the file.
    """

    received: str | None = None
    file: Path | None = None
    no_step: bool = False
    looked: float = -math.inf
    seen: bool = False

    def asked(self) -> bool:
        return self.received is not None or (self.file is not None and self.file.exists())

    def asked_lately(self, clock: Callable[[], float] = time.monotonic) -> bool:
        """As `asked`, for a call at every token: looks for the file, perhaps on a network, every `LOOK_SECONDS`."""
        if self.received is None and not self.seen and clock() - self.looked >= LOOK_SECONDS:
            self.looked, self.seen = clock(), self.asked()
        return self.received is not None or self.seen

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A scheduler may send its signal several times; only someone at a keyboard means "at once" by that."""
        if self.no_step or (self.received is not None and number == signal.SIGINT):
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            print(
                f"\n{self.received}: stopping after this step, or at once in an evaluation, with a checkpoint; "
                "another Ctrl-C ends the run without one",
                file=sys.stderr,
            )

    def note(self, number: int, frame: FrameType | None) -> None:
        """In a trainer process among several: the one that has started it decides on everything else."""
        self.received = signal.Signals(number).name

    def listen(self) -> None:
        """Note the stopping signals from now on."""
        for number in STOPPING:
            signal.signal(number, self.note)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A block before the first step, which a signal ends."""
        self.no_step = True
        try:
            yield
        finally:
            self.no_step = False


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Catch the stopping signals for as long as the block runs."""
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
