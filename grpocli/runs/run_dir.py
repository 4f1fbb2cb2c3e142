"""The folder of a run: its paths, its locks, and its errors."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

from grpocli.errors import ConfigError, GrpoError, RunError, config_errors
from grpocli.files import FULL, atomic_folder, clear_leftovers, lock, remove

logger = logging.getLogger(__name__)

KEY = "hydra.run.dir"
WORKERS_WITHIN = 15.0
"""Seconds in which trainer processes end after the process that started them was killed."""
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a network file system that is mounted without locks."""
BEFORE = ".before"
"""Folder with the config and the sessions as they were before a resume that has not done a step yet."""

STARTUP_FILES = {".hydra", ".lock", ".reserve", ".workers", "accelerate.json", "again", "engine", "job.json", "logs"}
STARTUP_FILES |= {"config.yaml", "run.log", "sessions.jsonl", "stop", "summary.json"}
"""The files of a run that has not begun its first step."""
STEP = re.compile(r"step_(\d+)(\.parquet)?")


def step_of(path: PurePath) -> int:
    """The step of a checkpoint's folder or a rollout file, by its name; -1 for others."""
    found = STEP.fullmatch(path.name)
    return int(found[1]) if found else -1


def resume_word(path: Path) -> str:
    """`resume=RUN`, quoted for a shell."""
    return shlex.quote(f"resume={path}")


def resume_command(path: Path) -> str:
    """The command that resumes a run."""
    return f"grpocli train {resume_word(path)}"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of a run, with the paths below it. key: the config key of the folder, for errors."""

    path: Path
    key: str = KEY

    @property
    def name(self) -> str:
        """The name of the run: its folder and the one above."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def config_before(self) -> Path:
        """The config of the run so far: not that of a resume which was killed before its first step."""
        before = self.path / BEFORE / self.config.name
        return before if before.is_file() else self.config

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The file with the outcome of the run."""
        return self.path / "summary.json"

    @property
    def sessions(self) -> Path:
        """One JSON object for each start of the run."""
        return self.path / "sessions.jsonl"

    @property
    def log(self) -> Path:
        """The log."""
        return self.path / "run.log"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints `step_000010/` and so on."""
        return self.path / "checkpoints"

    def saved_steps(self) -> list[int]:
        """The steps of its checkpoints, damaged ones included."""
        return sorted(step for step in map(step_of, self.checkpoints.glob("step_*")) if step >= 0)

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after a step."""
        return self.checkpoints / f"step_{step:06d}"

    @property
    def model(self) -> Path:
        """The final model, a Hugging Face folder."""
        return self.path / "model"

    def rollouts(self, step: int) -> Path:
        """The completions that were sampled for a step."""
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def delete_rollouts_after(self, step: int) -> None:
        """Delete the rollout files of later steps, which a resume samples again."""
        for path in self.rollouts(0).parent.glob("step_*.parquet"):
            if step_of(path) > step:
                path.unlink()

    @property
    def unbegun(self) -> bool:
        """Whether a resume has not done a step yet."""
        return (self.path / BEFORE).is_dir()

    def keep_before(self) -> None:
        """Keep the config and the sessions of the run so far, until `begin` or `restore`."""
        with atomic_folder(self.path / BEFORE, replace=True) as folder:
            for path in (self.config, self.sessions):
                shutil.copy2(path, folder) if path.is_file() else (folder / path.name).touch()

    def begin(self) -> None:
        """Make the config of a resume that of the run, after its first step."""
        done = self.path / f".tmp-{BEFORE}-{os.getpid()}"  # renamed first, so that no half of it is restored
        (self.path / BEFORE).rename(done)
        remove(done)

    def restore(self) -> None:
        """Leave the run as it was before a resume that has ended before its first step."""
        if self.unbegun:
            for path in (self.path / BEFORE).iterdir():
                path.replace(self.path / path.name)
            (self.path / BEFORE).rmdir()

    def check_free(self) -> None:
        """Raise ConfigError if a new run would overwrite a run or other files. Writes nothing."""
        others = (self.model, self.checkpoints, self.rollouts(0).parent, self.summary)
        for problem, paths in (
            (f"holds a run already; continue it with {resume_word(self.path)}, or", (self.metrics, self.config)),
            ("has files that the run would overwrite;", others),
        ):
            if any(path.exists() for path in paths):
                raise ConfigError(f"{problem} choose another folder", key=self.key, value=self.path)

    def check_writable(self, resuming: bool) -> None:
        """Create the folder and write to it. Raises ConfigError if that fails, or if it holds another run."""
        if not resuming:
            self.check_free()
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".tmp-") as file:
                file.write(b"\0" * 65536)
                file.flush()
                os.fsync(file.fileno())
        if resuming:
            for folder in (self.path, self.checkpoints, self.path / "rollouts"):
                clear_leftovers(folder)

    def _writing(self) -> AbstractContextManager[None]:
        """Turns an OSError into a ConfigError with the remedy."""
        hint = "make it writable, or free some space"
        return config_errors(OSError, says="cannot be written: {}", key=self.key, value=self.path, hint=hint)

    @contextmanager
    def locked(self, timeout: float = 0.0) -> Iterator[None]:
        """Lock the folder for this process. The kernel releases the lock however the process ends.

        Raises ConfigError if another process still has it after `timeout` seconds: a file server takes a while to
        notice that a machine has died.
        """
        timeout = max(timeout, 0.5)  # `is_running` may hold the lock for a moment
        with self._holding(".lock", timeout, "another process is running in it; wait, or stop it"):
            problem = "trainer processes of an earlier start still run in it; wait, or kill them"
            with self._holding(".workers", max(timeout, WORKERS_WITHIN), problem):
                pass  # from now on only this process starts trainer processes
            yield

    def is_running(self) -> bool:
        """Whether a process has locked the folder. None has if the file system knows no locks."""
        try:
            with (self.path / ".lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def worker_lock(self) -> AbstractContextManager[None]:
        """A shared lock of a trainer process, which may outlive the launching process when that one is killed."""
        return self._holding(".workers", WORKERS_WITHIN, "another process is being started in it", fcntl.LOCK_SH)

    @contextmanager
    def _holding(self, name: str, timeout: float, problem: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / name).open("a")  # not "w", which would empty the file before it is locked
        _locks.add(file)
        with file:
            try:
                lock(file, kind, timeout)
            except BlockingIOError as error:
                raise ConfigError(problem, key=self.key, value=self.path) from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                logger.warning("%s has no locks (%s): a second process is not kept out", self.path, error.strerror)
            yield

    def is_fresh(self) -> bool:
        """Whether the folder holds nothing but the log that Hydra has just created."""
        return not self.path.is_dir() or {p.name for p in self.path.iterdir()} <= {self.log.name}

    def remove_unstarted(self) -> None:
        """Remove the folder of a run that never began, which holds only STARTUP_FILES."""
        if {p.name for p in self.path.iterdir()} <= STARTUP_FILES:
            shutil.rmtree(self.path)

    def run_error(self, error: OSError) -> GrpoError:
        """The error for an OSError during a run, with the remedy."""
        where, resume = error.filename or self.path, resume_word(self.path)
        if error.errno in FULL:
            return RunError(f"no space left on the disk while writing {where}; free some, then {resume}")
        return RunError(f"{where}: {error.strerror or error}; fix that, then {resume}")


def _close_locks() -> None:
    """In a forked process: one that user code leaves behind would keep the lock."""
    for file in _locks:
        file.close()


_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_locks)
