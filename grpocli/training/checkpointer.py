"""Writing checkpoints beside the run: what they hold does not change before the next update, which waits for them."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from os import _exit as leave  # before code of the user's runs, during which the other name refuses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpocli.distributed.world import World

logger = logging.getLogger(__name__)


class Saver:
    """One checkpoint at a time, written by a thread while the next rollouts are sampled.

    Where processes share weights or moments these are gathered in collective calls that cannot go beside others: then
    it is written at once. Every method is collective.
    """

    def __init__(self, world: World) -> None:
        self._channel = world.channel() if world.parallel.whole else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def writing(self) -> bool:
        """Whether there is one that nobody has waited for. Not collective."""
        return self._thread is not None

    def start(self, write: Callable[[], None]) -> None:
        """Have `write` write a checkpoint, after the one before it, whose errors are raised."""
        self.wait()
        if self._channel is None:
            write()
            return
        # a daemon: after a second signal the process must be able to end
        self._thread = threading.Thread(target=self._work, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is whole. Raises what `write` raised."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error

    def close(self, patience: float | None = None) -> None:
        """As `wait`, at the end of a run that has something else to tell.

        patience: seconds after which the thread is left alone (None: never).
        """
        if self._thread:
            self._thread.join(patience)
            if self._thread.is_alive():
                logger.warning("the last checkpoint was not written: it took longer than %s s", patience)
                atexit.register(_end_at_once)
                return
        try:
            self.wait()
        except Exception:
            logger.exception("the last checkpoint was not written")

    def _work(self, write: Callable[[], None]) -> None:
        assert self._channel is not None
        try:
            with self._channel():
                write()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error


def _end_at_once() -> None:
    """Exit without Python's finalization, which aborts the process while a daemon thread is inside of C++."""
    sys.stdout.flush()
    sys.stderr.flush()
    leave(1)
