"""Deadlines for calls in this process.

A call in the main thread stays in the main thread, so that it may use `signal.alarm`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FrameType
from typing import Any, TypeVar

from grpocli.processes.threads import run_in_thread

T = TypeVar("T")

GRACE = 30.0
"""Seconds after a deadline until the process ends, if the call cannot be interrupted."""
FOREVER = 1e9
"""The longest deadline in seconds, thirty years. Timers overflow above it."""
RETRY = 0.1
"""Seconds between two attempts to interrupt a call, since it may catch even `_Late`."""
SIGEV_THREAD_ID = 4
EXPIRED = signal.SIGRTMIN
"""The signal of a deadline: no scheduler sends it."""
LAST_WORDS = """
import os, sys
traceback = sys.stdin.read()
if traceback:
    print(sys.argv[1] + "\\n" + traceback * ("GRPOCLI_TRACEBACK" in os.environ), end="", file=sys.stderr)
"""


class _Late(BaseException):
    """A BaseException, which passes through `except Exception` in the interrupted code."""


def within(seconds: float, what: str, call: Callable[[], T], remedy: str = "") -> T:
    """The result of `call`. Raises its exception, or TimeoutError(what) if it takes longer.

    Only the main thread can be interrupted. From another thread (`rollout.max_staleness` above 0) the call runs in a
    new thread, which is abandoned at the deadline. If a call cannot be interrupted, because it holds the interpreter's
    lock or never handles signals, the process ends GRACE seconds later with an error that ends in `remedy`; in the main
    thread only if a remedy is given.
    """
    seconds = min(seconds, FOREVER)
    main = threading.current_thread() is threading.main_thread()
    with _ended_after(seconds + GRACE, what, remedy) if remedy or not main else nullcontext():
        if main:
            with deadline(seconds, what):
                return call()
        done = run_in_thread(call, "deadline")
        try:
            return done.result(seconds)
        except TimeoutError as error:
            raise error if done.done() else TimeoutError(what) from error


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError(what) in the block if it takes longer, or after the block if it catches the exception.

    Interrupts blocking system calls and C code that handles signals, such as regular expressions. Outside the main
    thread there is no deadline, because Python handles no signals there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = False
    seconds = min(seconds, FOREVER)
    end = time.monotonic() + seconds

    def give_up(number: int, frame: FrameType | None) -> None:
        if not over and time.monotonic() >= end:
            raise _Late

    timer = _new_timer()
    before = signal.signal(EXPIRED, give_up)
    try:
        _start(timer, seconds)
        yield
        if time.monotonic() >= end:
            raise _Late
    except _Late as late:
        over = True  # first, since the timer still sends signals
        raise TimeoutError(what).with_traceback(late.__traceback__) from None
    finally:
        over = True
        _timers().timer_delete(timer)
        signal.signal(EXPIRED, before)  # delivers a pending signal to our handler first


def _new_timer() -> ctypes.c_void_p:
    """A kernel timer that sends EXPIRED to this thread.

    A Python timer needs the interpreter's lock, which a regular expression holds until it ends.
    """
    event = struct.pack("QiiI44x", 0, EXPIRED, SIGEV_THREAD_ID, threading.get_native_id())
    timer = ctypes.c_void_p()
    if _timers().timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) != 0:
        raise OSError(ctypes.get_errno(), "the system has no timer left for a deadline")
    return timer


def _start(timer: ctypes.c_void_p, seconds: float) -> None:
    """Send the timer's signal after `seconds`, and then every RETRY seconds."""
    times = struct.pack("qqqq", 0, int(RETRY * 1e9), int(seconds), max(1, int(seconds % 1 * 1e9)))
    _timers().timer_settime(timer, 0, times, None)


@cache
def _timers() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)  # before glibc 2.34


_ENDING = threading.Lock()


@contextmanager
def _ended_after(seconds: float, what: str, remedy: str) -> Iterator[None]:
    """End the process with exit code 1 and an error if the block takes longer. One block at a time."""
    sentence = f"grpocli: error: {what}, and cannot be interrupted" + (f": {remedy}" if remedy else "")
    if not _ENDING.acquire(blocking=False):
        yield
        return
    process = os.getpid()
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=_last_words(sentence))
        yield
    finally:
        if os.getpid() == process:  # a forked process lacks faulthandler's thread and would wait for it
            faulthandler.cancel_dump_traceback_later()
        _ENDING.release()


@cache
def _last_words(sentence: str) -> int:
    """A pipe to a helper process, which prints the sentence when this process has written to it and ended.

    Python can no longer run then: faulthandler's thread can only write a traceback.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", LAST_WORDS, sentence]
    streams = [(os.POSIX_SPAWN_DUP2, read_end, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=streams, setpgroup=0)
    os.close(read_end)
    return write_end
