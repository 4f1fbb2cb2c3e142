"""Ctrl-C and the signals of schedulers stop a run after its step, with a checkpoint; a second Ctrl-C ends it at once.

The way of a signal through the code:

    signals.py                  `stop_signal` catches it in the process that the user started; `StopSignal` remembers it
    launch/trainer_launcher.py  creates RUN/stop for several trainer processes, since signals do not reach all of them
    training/trainer.py         checks after each step, writes a checkpoint and raises Stopped: exit code 3
    guard.py, reaper.py         end servers and trainer processes when their parent ends, even by SIGKILL
"""

from __future__ import annotations

import faulthandler
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

CHECK_SECONDS = 0.25
"""Seconds between checks for the stop file in `StopSignal.requested_cached`."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)


def handle_stops(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler of the stopping signals, except of those that this process ignores since its start (nohup).

    Returns the handlers before, by signal; none outside the main thread, where they cannot be changed.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handled = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


def restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Undo `handle_stops`."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def enable_crash_tracebacks() -> None:
    """Make Python print its stack when native code crashes (a segmentation fault), which names the calling function."""
    if sys.__stderr__ and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)


@dataclass(slots=True)
class StopSignal:
    """Whether a stop of the run is requested."""

    received: str | None = None
    """The name of the first signal in the process that the user started."""
    file: Path | None = None
    """A file whose existence also requests a stop, for the trainer processes, which ignore signals."""
    immediate: bool = False
    """A signal raises KeyboardInterrupt, because there is no step to finish."""
    checked_at: float = -math.inf
    """When `requested_cached` last checked."""
    was_requested: bool = False
    """The result of that check."""

    def requested(self) -> bool:
        """Whether a signal was received or the file exists."""
        return self.received is not None or (self.file is not None and self.file.exists())

    def requested_cached(self, clock: Callable[[], float] = time.monotonic) -> bool:
        """`requested`, fast enough to call at every token: the file may be on a network, so it is checked only every
        CHECK_SECONDS."""
        if self.received is None and not self.was_requested and clock() - self.checked_at >= CHECK_SECONDS:
            self.checked_at, self.was_requested = clock(), self.requested()
        return self.received is not None or self.was_requested

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the process that the user started. Only a repeated SIGINT ends the run at once, because
        schedulers repeat their signals, also while the process ends."""
        repeated = self.received is not None
        if repeated and number != signal.SIGINT:
            return
        self.received = self.received or signal.Signals(number).name
        if repeated or self.immediate:
            raise KeyboardInterrupt
        print(
            f"\n{self.received}: stopping after this step and the rollouts in progress (in an evaluation as soon "
            "as the engine allows), with a checkpoint; another Ctrl-C ends the run without one",
            file=sys.stderr,
        )

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
    """Catch the stopping signals within the block, and after it if one came: the process is ending."""
    stop = StopSignal()
    before = handle_stops(stop.handle)
    try:
        yield stop
    finally:
        if stop.received is None:
            restore(before)
