"""The folder of a run, and what is where in it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from grpocli.errors import ConfigError, GrpoError, RunError
from grpocli.files import FULL, clear_leftovers

logger = logging.getLogger(__name__)

KEY = "hydra.run.dir"
LOCK_POLL = 0.5  # seconds between two tries
WORKERS_WITHIN = 15.0
"""Seconds in which trainer processes notice that the one that had started them was killed, and end."""
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Of a network file system that is mounted without locks."""


STARTUP_FILES = {
    ".hydra",
    ".lock",
    ".reserve",
    ".workers",
    "accelerate.json",
    "again",
    "config.yaml",
    "engine",
    "job.json",
    "logs",
    "run.log",
    "sessions.jsonl",
    "stop",
    "summary.json",
}
"""What is in a run's folder before its first step."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths below `path`. Files are made by whoever writes them. key: what errors call the folder, as it was typed."""

    path: Path
    key: str = KEY

    @property
    def name(self) -> str:
        """What the run is called: its folder and the one above."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def sessions(self) -> Path:
        """One JSON object for each start of the run."""
        return self.path / "sessions.jsonl"

    @property
    def log(self) -> Path:
        """Everything that is too much for the console."""
        return self.path / "run.log"

    @property
    def checkpoints(self) -> Path:
        """The folder of `step_000010/` and so on."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after a step."""
        return self.checkpoints / f"step_{step:06d}"

    @property
    def model(self) -> Path:
        """The final model, a Hugging Face folder."""
        return self.path / "model"

    def rollouts(self, step: int) -> Path:
        """What was sampled and kept in a step."""
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def forget_rollouts_after(self, step: int) -> None:
        """Delete those of later steps, which will be sampled again."""
        for path in self.rollouts(0).parent.glob("step_*.parquet"):
            if path.stem.removeprefix("step_").isdigit() and int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def check_free(self) -> None:
        """Raise ConfigError where a run would write over a run or over somebody's files. Writes nothing."""
        if self.metrics.exists() or self.config.exists():
            raise ConfigError(
                f"holds a run already; go on with resume={self.path}, or choose another folder",
                key=KEY,
                value=self.path,
            )
        taken = [
            path.name for path in (self.model, self.checkpoints, self.path / "rollouts", self.summary) if path.exists()
        ]
        if taken:
            problem = f"has a {taken[0]} already, which the run would write over; choose another folder"
            raise ConfigError(problem, key=self.key, value=self.path)
        for folder in self.path.absolute().parents:
            if RunDir(folder).config.exists() and RunDir(folder).metrics.exists():
                raise ConfigError(
                    f"is inside of the run {folder}; choose another folder", key=self.key, value=self.path
                )

    def check_writable(self, resuming: bool) -> None:
        """Make the folder and try to write. Raises ConfigError where that fails or another run is there."""
        if not resuming:
            self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".tmp-") as file:
                file.write(b"\0" * 65536)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"cannot be written: {self._why(error)}", key=self.key, value=self.path) from error
        if resuming:
            for folder in (self.path, self.checkpoints, self.path / "rollouts"):
                clear_leftovers(folder)

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Hold the folder for this process; the kernel lets go of it however the process ends.

        Raises ConfigError while another process runs in it, after `patience` seconds: a file server takes a while to
        notice that a machine has died.
        """
        patience = max(patience, LOCK_POLL)  # `is_running` may be asking in this moment
        with self._holding(".lock", patience, "another process is running in it; wait, or stop it"):
            problem = "trainer processes of an earlier start still run in it; wait, or kill them"
            with self._holding(".workers", max(patience, WORKERS_WITHIN), problem):
                pass  # those that come now are this process's
            yield

    def is_running(self) -> bool:
        """Whether a process holds the folder."""
        try:
            with (self.path / ".lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # never begun, or a file system without locks
            return False
        return False

    def worked_in(self) -> AbstractContextManager[None]:
        """Say that this trainer process runs in the folder: it may outlive the one that holds it, which was killed."""
        return self._holding(".workers", WORKERS_WITHIN, "another process is being started in it", fcntl.LOCK_SH)

    @contextmanager
    def _holding(self, name: str, patience: float, problem: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / name).open("a")  # not "w", which changes the file before the lock is held
        except OSError as error:
            raise ConfigError(f"cannot be written: {self._why(error)}", key=self.key, value=self.path) from error
        with file, _closed_after_fork(file):
            try:
                self._lock(file, kind, time.monotonic() + patience, problem)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                logger.warning("%s has no locks (%s): nothing keeps a second process out", self.path, error.strerror)
            yield

    def _lock(self, file: IO[str], kind: int, until: float, problem: str) -> None:
        while True:
            try:
                return fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise ConfigError(problem, key=self.key, value=self.path) from error
            time.sleep(LOCK_POLL)

    def _why(self, error: OSError) -> str:
        where = f" ({error.filename})" if error.filename and Path(error.filename) != self.path else ""
        advice = ["free some space"] if error.errno in FULL else []
        advice += ["choose another folder"] if self.key != "resume" else []
        return f"{error.strerror or error}{where}; {', or '.join(advice) or 'make it writable'}"

    def is_fresh(self) -> bool:
        """Whether nothing is in the folder but what Hydra has just put there."""
        return not self.path.is_dir() or {p.name for p in self.path.iterdir()} <= {self.log.name}

    def forget(self) -> None:
        """Remove the folder of a run that never began, which `is_fresh` before: it holds what every start leaves."""
        if {p.name for p in self.path.iterdir()} <= STARTUP_FILES:
            shutil.rmtree(self.path)

    def trouble(self, error: OSError) -> GrpoError:
        """An OSError in the middle of a run, as a sentence."""
        where = error.filename or self.path
        reason = error.strerror or str(error)
        if error.errno in FULL:
            return RunError(f"no space left on the disk while writing {where}; free some, then resume={self.path}")
        if error.errno in FORBIDDEN and self.path in (Path(where), *Path(where).parents):
            return RunError(f"{self.key}={self.path}: {reason} ({where}); make it writable, then resume={self.path}")
        if not self.config.exists():
            problem = "the folder was removed or emptied while the run was writing in it; start again in another one"
            return RunError(f"{self.key}={self.path}: {problem}")
        return RunError(f"{where}: {reason}; put that right, then resume={self.path}")


@contextmanager
def _closed_after_fork(file: IO[str]) -> Iterator[None]:
    """A lock that forked processes do not share: one that code of the user's leaves behind would keep it."""
    _locks.add(file)
    try:
        yield
    finally:
        _locks.discard(file)


def _close_locks() -> None:
    for file in _locks:
        file.close()


_locks: set[IO[str]] = set()
os.register_at_fork(after_in_child=_close_locks)
