"""Deadlines for calls in this process. In the main thread the call stays there, so that `signal.alarm` works inside."""

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
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

GRACE = 30.0
"""Seconds after a deadline in which a call has to be interrupted, or the process ends."""
FOREVER = 1e9
"""The longest deadline, in seconds: thirty years. Timers overflow above it."""
AGAIN = 0.1
"""Seconds between two attempts to interrupt a call, which may catch even `_Late`."""
SIGEV_THREAD_ID = 4
LAST_WORDS = """
import os, sys
found = sys.stdin.read()
if found:
    print(sys.argv[1] + "\\n" + found * ("GRPOCLI_TRACEBACK" in os.environ), end="", file=sys.stderr)
"""


class _Late(BaseException):
    """Passes through the `except Exception` of the code that is interrupted."""


def within(seconds: float, what: str, call: Callable[[], T], remedy: str = "") -> T:
    """What `call` returns or raises; TimeoutError(what) when it takes longer.

    Only the main thread can be interrupted: in another (`rollout.max_staleness` above 0) the call gets a thread of its
    own, which is left behind. A call that cannot be interrupted either, since it holds the interpreter's lock or never
    looks for signals, ends the process GRACE seconds later, with a sentence that ends in `remedy`; in the main thread,
    where that is rare, only if there is one.
    """
    seconds = min(seconds, FOREVER)
    main = threading.current_thread() is threading.main_thread()
    with _ended_after(seconds + GRACE, what, remedy) if remedy or not main else nullcontext():
        if main:
            with deadline(seconds, what):
                return call()
        done: Future[T] = Future()
        threading.Thread(target=_into, args=(done, call), daemon=True).start()
        try:
            return done.result(seconds)
        except TimeoutError as error:
            raise error if done.done() else TimeoutError(what) from error


def _into(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
        done.set_exception(error)


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError(what) in the block when it takes longer, or after it where the block has caught that.

    Blocking system calls are interrupted, and C code that looks for signals, as regular expressions do. Uses SIGUSR2.
    Outside of the main thread, where Python handles no signals, there is no deadline.
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
    before = signal.signal(signal.SIGUSR2, give_up)
    try:
        _start(timer, seconds)
        yield
        if time.monotonic() >= end:
            raise _Late
    except _Late as late:
        over = True  # at once: the timer still sends signals
        raise TimeoutError(what).with_traceback(late.__traceback__) from None
    finally:
        over = True
        _timers().timer_delete(timer)
        signal.signal(signal.SIGUSR2, before)  # calls our handler first, where a signal is waiting for it


def _new_timer() -> ctypes.c_void_p:
    """A timer of the kernel that sends SIGUSR2 to this thread.

    One of Python's would need the interpreter's lock, which a regular expression keeps until it is done.
    """
    event = struct.pack("QiiI44x", 0, signal.SIGUSR2, SIGEV_THREAD_ID, threading.get_native_id())
    timer = ctypes.c_void_p()
    if _timers().timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) != 0:
        raise OSError(ctypes.get_errno(), "the system has no timer left for a deadline")
    return timer


def _start(timer: ctypes.c_void_p, seconds: float) -> None:
    """Let the timer send its signal after `seconds`, then every AGAIN seconds."""
    times = struct.pack("qqqq", 0, int(AGAIN * 1e9), int(seconds), max(1, int(seconds % 1 * 1e9)))
    _timers().timer_settime(timer, 0, times, None)


@cache
def _timers() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)  # before glibc 2.34


_ENDING = threading.Lock()


@contextmanager
def _ended_after(seconds: float, what: str, remedy: str) -> Iterator[None]:
    """End the process, with exit code 1 and a sentence, where the block takes longer. One block at a time."""
    sentence = f"grpocli: error: {what}, and cannot be interrupted" + (f": {remedy}" if remedy else "")
    if not _ENDING.acquire(blocking=False):
        yield
        return
    process = os.getpid()
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=_last_words(sentence))
        yield
    finally:
        if os.getpid() == process:  # a process that the block has forked has no such thread, and would wait for it
            faulthandler.cancel_dump_traceback_later()
        _ENDING.release()


@cache
def _last_words(sentence: str) -> int:
    """A pipe to a helper process, which prints the sentence once this process has written to it and ended.

    faulthandler's thread can only write a traceback, since Python cannot run any more.
    """
    heard, said = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", LAST_WORDS, sentence]
    streams = [(os.POSIX_SPAWN_DUP2, heard, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=streams, setpgroup=0)
    os.close(heard)
    return said
