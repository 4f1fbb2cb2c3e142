"""When a run pushes: its checkpoints while it goes on, and everything at its end. A failed push costs it nothing."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import GrpoError
from grpocli.files import QuietFileHandler
from grpocli.processes.threads import run_in_thread
from grpocli.publish.push import Pusher
from grpocli.runs.run_dir import RunDir

if TYPE_CHECKING:
    from grpocli.config.schema import Hub
    from grpocli.views.view import View

logger = logging.getLogger(__name__)

COPY = ".tmp-push_"
"""The name of a copy begins with this; a resume deletes it after a kill."""


class CheckpointPushes:
    """Pushes checkpoints in a thread, one after another, while the run goes on.

    Each is copied by hard links first, since the run may delete it meanwhile. Without hard links it is pushed from its
    own folder, because a copy would hold up the training; then one that the run deletes meanwhile is left out. A newer
    one replaces one that waits. A failure is a warning.
    """

    def __init__(self, pusher: Pusher, warn: Callable[[str], None]) -> None:
        self._pusher, self._warn = pusher, warn
        self._lock = threading.Lock()
        self._waiting: tuple[int, Path] | None = None
        self._thread: threading.Thread | None = None
        self._failed = False

    def add(self, step: int) -> None:
        """Push the checkpoint after a step, which is whole."""
        folder = _linked(self._pusher.run_dir.checkpoint(step))
        with self._lock:
            replaced, self._waiting = self._waiting, (step, folder)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="push", daemon=True)
                self._thread.start()
        if replaced:
            logger.info("step %d: its checkpoint is not pushed, as that of step %d follows", replaced[0], step)
            _remove_copy(replaced[1])

    def close(self, timeout: float) -> None:
        """Wait for the pushes, at most `timeout` seconds."""
        if thread := self._thread:
            thread.join(timeout)
            if thread.is_alive():
                self._warn(f"the last checkpoint is not pushed yet: {self._remedy()}")

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._thread = None
                    return
                (step, folder), self._waiting = self._waiting, None
            try:
                self._pusher.push_checkpoint(folder, step)
                logger.info("pushed the checkpoint of step %d", step)
            except Exception as error:
                if not folder.is_dir():
                    logger.info("step %d: its checkpoint is not pushed, as the run has deleted it", step)
                    continue
                logger.exception("the checkpoint of step %d was not pushed", step)
                if not self._failed:
                    self._warn(f"the checkpoint of step {step} is not pushed: {reason(error)}; {self._remedy()}")
                self._failed = True
            finally:
                _remove_copy(folder)

    def _remedy(self) -> str:
        return f"the run goes on, and later pushes it with: {push_command(self._pusher.run_dir, self._pusher.hub)}"


def _linked(checkpoint: Path) -> Path:
    """A copy of a checkpoint by hard links; the checkpoint itself where there are none."""
    copy = checkpoint.with_name(f"{COPY}{checkpoint.name}-{os.getpid()}")
    try:
        shutil.copytree(checkpoint, copy, copy_function=os.link)
    except OSError as error:  # shutil.Error, too
        logger.info("%s is pushed from its own folder, as it cannot be linked: %s", checkpoint.name, error)
        shutil.rmtree(copy, ignore_errors=True)
        return checkpoint
    return copy


def _remove_copy(folder: Path) -> None:
    if folder.name.startswith(COPY):
        shutil.rmtree(folder, ignore_errors=True)


def reason(error: BaseException) -> str:
    """Why a push failed, for a sentence."""
    return str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"


def push_finished(hub: Hub, run_dir: RunDir, view: View) -> None:
    """Push a finished run. A failure is a warning with the command that repeats the push: the run has its model."""
    if hub.push is None:
        return
    view.stage(f"pushing to the hub, {hub.push}")
    pushing = run_in_thread(lambda: Pusher(run_dir, hub).push(view.progress), "push")
    if not wait([pushing], hub.timeout).done:
        why = f"no end after hub.timeout={hub.timeout:g} seconds"
    elif error := pushing.exception():
        logger.error("the push failed", exc_info=error)
        why = reason(error)
    else:
        run_dir.push_due.unlink(missing_ok=True)
        logger.info("pushed to %s", pushing.result())
        view.note(f"pushed to {pushing.result()}")
        return
    view.warn(f"not pushed: {why}; the run is whole, push it with: {push_command(run_dir, hub)}")


def complete_push(hub: Hub, run_dir: RunDir) -> None:
    """Push a finished run whose push was interrupted or has failed."""
    from grpocli.views.live_view import make_view

    if hub.push is None or not run_dir.push_due.exists():
        return
    logging.basicConfig(level=logging.INFO, handlers=[QuietFileHandler(run_dir.log, delay=True)])
    view = make_view()
    try:
        with run_dir.locked():
            push_finished(hub, run_dir, view)
    finally:
        view.stop()


def push_command(run_dir: RunDir, hub: Hub) -> str:
    """The command that pushes a run as its config asks."""
    options = f" --revision {shlex.quote(hub.revision)}" if hub.revision else ""
    options += " --checkpoints" if hub.checkpoints else ""
    return f"grpocli push {shlex.quote(str(run_dir.path))} --to {hub.push}{options}"
