"""Restores process-wide state that a user's reward changes in the trainer process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.config.user_code import keep_random_state, staying
from grpocli.errors import RunError

if TYPE_CHECKING:
    from grpocli.rewards.reward import Sample

logger = logging.getLogger(__name__)

LOCKS = (".lock", ".workers")
"""Names of the lock files in a run folder."""


class ProcessDamaged(RunError):
    """A reward has closed files of the trainer process that cannot be restored."""


@contextmanager
def isolated_state(name: str, samples: Sequence[Sample]) -> Iterator[None]:
    """Isolate the state of this process from the reward `name` while it scores `samples`.

    The reward's random numbers depend only on the samples, so that a resumed run repeats them, and drawing them does
    not change other random numbers of the process.
    """
    with _settings(name), keep_random_state(seed_for(samples)), _descriptors(name), staying(name):
        yield


def seed_for(samples: Sequence[Sample]) -> int:
    """The seed of a reward's random numbers for these samples."""
    beginnings = [sample.token_ids[:16] for sample in samples]  # enough to differ between steps
    return zlib.crc32(repr(beginnings).encode())


@contextmanager
def _settings(name: str) -> Iterator[None]:
    """Restore the settings that have changed; setting the others could disturb another thread."""
    before = {setting: get() for setting, (get, _) in SETTINGS.items()}
    try:
        yield
    finally:
        changed = [setting for setting, (get, _) in SETTINGS.items() if get() != before[setting]]
        for setting in changed:
            SETTINGS[setting][1](before[setting])
        if changed:
            logger.warning("%s changed %s for the whole process, which was undone", name, ", ".join(changed))


def _handlers() -> dict[int, Any] | None:
    """Signal handlers; None outside the main thread, where they cannot be changed."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _handle(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) != handler and handler is not None:
            signal.signal(number, handler)


def _alarms() -> list[bool]:
    """Whether each of the process's interval timers is running."""
    return [signal.getitimer(timer)[0] > 0 for timer in TIMERS]


def _stop_alarms(before: list[bool]) -> None:
    for timer, was_running in zip(TIMERS, before, strict=True):
        if not was_running:
            signal.setitimer(timer, 0)


def _folder() -> Path:
    """The working directory; "/" if it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's threads": (torch.get_num_threads, torch.set_num_threads),
    "the working directory": (_folder, os.chdir),
    "alarms": (_alarms, _stop_alarms),  # before the handlers: an alarm without a handler ends the process
    "handlers of signals": (_handlers, _handle),
}
"""The settings that are restored, each with its getter and setter."""


@contextmanager
def _descriptors(name: str) -> Iterator[None]:
    """Restore closed descriptors of the terminal, the log and the locks, whose numbers new files would get.

    Raises ProcessDamaged if they cannot be restored.
    """
    before = {file: _identity(file) for file in sorted(_protected())}
    copies = {file: os.dup(file) for file in before}
    try:
        yield
    finally:
        changed = [file for file, was in before.items() if _identity(file) != was]
        lost = [file for file in changed if _identity(copies[file]) != before[file]]
        for file in changed:
            if file in lost:
                copies[file] = os.open(os.devnull, os.O_RDWR)
            if copies[file] != file:
                os.dup2(copies[file], file, inheritable=file <= 2)
        for file, copy in copies.items():
            if copy != file and _identity(copy) == _identity(file):
                os.close(copy)
        if lost:
            raise ProcessDamaged(f"{name} closed files of the run (descriptors {', '.join(map(str, lost))})")
        if changed:
            logger.warning("%s closed or replaced descriptors %s, which was undone", name, changed)


def _protected() -> set[int]:
    """Descriptors that must stay open while a reward scores."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    found = {handler.stream.fileno() for handler in handlers if handler.stream and not handler.stream.closed}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if link.readlink().name in LOCKS:
                found.add(int(link.name))
    return {file for file in found | {0, 1, 2} if _identity(file)}


def _identity(file: int) -> tuple[int, int] | None:
    """Device and inode of an open descriptor; None for a closed one."""
    try:
        found = os.fstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino
