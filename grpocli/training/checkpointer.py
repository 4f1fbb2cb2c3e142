"""The checkpoints of a run: saved in the background, deleted when they are old, and found again by a resume.

A checkpoint is written while the next rollouts are sampled and before the next update.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from grpocli.errors import ConfigError, GrpoError
from grpocli.files import remove
from grpocli.processes.threads import run_in_thread
from grpocli.progress import Progress, unreported
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.training import checkpoint
from grpocli.training.checkpoint import NAME, STATE, check_files, load_state

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.training.prefetch import PrefetchState

logger = logging.getLogger(__name__)

UNREADABLE = (GrpoError, RuntimeError, ValueError, KeyError, TypeError, EOFError, SafetensorError)
"""The errors of reading a file with unexpected content."""
LOST = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EIO)
"""Error numbers of a damaged file. With any other, such as a missing permission, the file may be whole."""


@dataclass(slots=True)
class Checkpointer:
    """Saves the checkpoints of a run in a thread, one at a time, and deletes the oldest. Every method is collective.

    Where processes share weights or optimizer state (FSDP2, ZeRO), these are gathered in collective calls that cannot
    run beside others, so a checkpoint is saved at once, in the caller's thread.
    """

    run_dir: RunDir
    keep: int
    """How many checkpoints stay; 0: all."""
    contents: checkpoint.Contents
    """What each checkpoint holds beside its rollouts."""
    world: World
    progress: Progress = unreported
    unreported: list[int] = field(default_factory=list)
    """The steps of checkpoints that `take_saved` has not returned yet."""
    _channel: Callable[[], AbstractContextManager[None]] | None = field(init=False)
    _pending: Future[None] | None = None

    def __post_init__(self) -> None:
        self._channel = self.world.channel() if self.world.parallel.replicated else None

    def save(self, state: checkpoint.State, prefetched: PrefetchState) -> None:
        """Start to save. The policy, optimizer and reference must not change until `wait` returns.

        prefetched: the rollouts and scores that the next steps begin with.
        """
        self.unreported.append(state.step)
        self.start(partial(self._save, state, replace(self.contents, prefetched=prefetched)))

    def _save(self, state: checkpoint.State, contents: checkpoint.Contents) -> None:
        checkpoint.save(self.run_dir.checkpoint(state.step), state, contents, self.world, self.progress)
        if self.world.is_main:
            prune(self.run_dir.checkpoints, self.keep)
        self.world.barrier()

    def start(self, write: Callable[[], None]) -> None:
        """Start `write` after the pending one, and raise the pending one's error."""
        self.wait()
        if self._channel is None:
            write()
        else:
            self._pending = run_in_thread(partial(self._in_channel, write), "checkpoint")

    def _in_channel(self, write: Callable[[], None]) -> None:
        assert self._channel is not None
        with self._channel():
            write()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is pending. Not collective."""
        return self._pending is not None

    def wait(self) -> None:
        """Wait until the checkpoint is saved, and raise the error of saving it."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def take_saved(self) -> list[int]:
        """The steps of checkpoints that are whole by now, each once. Call `wait` before."""
        steps = self.unreported.copy()
        self.unreported.clear()
        return steps

    def close(self, wait: bool = True) -> None:
        """Wait for the checkpoint, but log its error, because the run ends for another reason. wait: else leave it."""
        try:
            if wait:
                self.wait()
        except Exception:
            logger.exception("the last checkpoint was not written")


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return [path for path in _numbered(folder) if (path / STATE).is_file()]


def _numbered(folder: Path) -> list[Path]:
    """Folders of checkpoints, damaged ones included, oldest first."""
    folders = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in folders if any(path.iterdir())), key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint below `folder`."""
    whole = checkpoints(folder)
    return whole[-1] if whole else None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (0: none)."""
    for path in checkpoints(folder)[:-keep] if keep else []:
        # renamed first: a half-deleted checkpoint must not look whole, and a resume deletes .tmp- folders
        doomed = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        path.rename(doomed)
        remove(doomed)


def set_aside_after(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps, which are damaged, so that a later resume and `prune` ignore them."""
    for path in _numbered(folder):
        if step_of(path) > step:
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))


@contextmanager
def restoring(path: Path | None) -> Iterator[None]:
    """Turn the errors of an unreadable checkpoint into a ConfigError with the remedy."""
    try:
        yield
    except UNREADABLE as error:
        if path is None or (isinstance(error, ConfigError) and error.value != str(path)):
            raise  # something else is at fault
        problem = f"the checkpoint {path} cannot be read ({_cause(error)})"
        raise ConfigError(problem, key="resume", hint="remove that folder to go on from the one before") from error


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a resume starts from."""

    path: Path | None = None
    """None if the run has none yet."""
    damaged: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints, with what is wrong with each."""

    @property
    def fallback(self) -> list[str]:
        """A sentence for each damaged checkpoint."""
        return [
            f"the checkpoint {path.name} was damaged ({problem}) and renamed to {_aside(path).name}"
            for path, problem in self.damaged.items()
        ]


def resume_point(run_dir: Path, fallback: bool, progress: Progress = unreported) -> ResumePoint:
    """The newest checkpoint of a run, after checking every file.

    fallback: if it is damaged, take the newest whole one. Raises ConfigError if the run's checkpoints are all damaged
    or deleted; OSError if files cannot be read but may be whole.
    """
    run = SavedRun(run_dir)
    damaged: dict[Path, str] = {}
    whole = None
    for path in reversed(_numbered(run.dir.checkpoints)):
        try:
            owner = load_state(path).run
            if owner and run.id and owner != run.id:
                raise ValueError("it is of another run")
            check_files(path, progress)
        except (OSError, *UNREADABLE) as error:
            if isinstance(error, OSError) and error.errno not in LOST:
                raise
            damaged[path] = _cause(error)
        else:
            whole = path
            break
    new_run = "start a new run"
    if run.dir.model.is_dir():
        new_run += f" from its final model with {shlex.quote(f'model={run.dir.model}')}"
    if damaged and not (whole and fallback):
        newest, problem = next(iter(damaged.items()))
        remedy = f"no other one is whole: {new_run}"
        if whole:
            remedy = f"resume_fallback=true goes on from {whole.name}, the newest one that is whole"
        raise ConfigError(f"the checkpoint {newest} is damaged ({problem})", key="resume", hint=remedy)
    if not whole and _had_checkpoint(run):
        problem = "the run has saved checkpoints, and none is left to go on from"
        raise ConfigError(problem, key="resume", value=run_dir, hint=new_run)
    return ResumePoint(whole, damaged)


def _had_checkpoint(run: SavedRun) -> bool:
    """Whether the run recorded a whole checkpoint: its summary, a step after it or a resume from it."""
    saved = run.finished_steps or run.summary.get("checkpoint") or any(one.step for one in run.sessions)
    return bool(saved) or any("time/checkpoint" in row for row in run.metrics)


def _aside(path: Path) -> Path:
    return path.with_name(f"damaged_{path.name}")


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).name} is missing"
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
