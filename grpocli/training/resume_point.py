"""The checkpoints of a run: which one a resume starts from, and which are deleted."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpocli.errors import ConfigError, GrpoError
from grpocli.files import remove
from grpocli.progress import Progress, unreported
from grpocli.runs.saved_run import SavedRun
from grpocli.training.checkpoint import NAME, STATE, check_files, load_state

UNREADABLE = (GrpoError, RuntimeError, ValueError, KeyError, TypeError, EOFError)
"""The errors of reading a file with unexpected content."""
LOST = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EIO)
"""Error numbers of a damaged file. With any other, such as a missing permission, the file may be whole."""


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
    """The checkpoint that a resume starts from.

    path: None if the run has none yet. damaged: newer checkpoints, with what is wrong with each.
    """

    path: Path | None = None
    damaged: dict[Path, str] = field(default_factory=dict)

    @property
    def fallback(self) -> list[str]:
        """A sentence for each damaged checkpoint."""
        return [
            f"the checkpoint {path.name} was damaged ({problem}) and renamed to {_aside(path).name}"
            for path, problem in self.damaged.items()
        ]


def resume_point(run_dir: Path, fallback: bool, progress: Progress = unreported) -> ResumePoint:
    """The newest checkpoint of a run, after checking every file.

    fallback: if it is damaged, take the newest whole one. Raises ConfigError if the run's checkpoints
    are all damaged or deleted; OSError if files cannot be read but may be whole.
    """
    saved = SavedRun(run_dir)
    damaged: dict[Path, str] = {}
    point, run = None, saved.id
    for path in reversed(_numbered(run_dir / "checkpoints")):
        try:
            state = load_state(path)
            if run and state.run not in ("", run):
                raise ValueError("it is of another run")
            check_files(path, progress)
            point = ResumePoint(path, damaged)
            break
        except (OSError, *UNREADABLE) as error:
            if isinstance(error, OSError) and error.errno not in LOST:
                raise
            damaged[path] = _cause(error)
    if damaged and not (point and fallback):
        newest, problem = next(iter(damaged.items()))
        remedy = (
            f"resume_fallback=true goes on from {point.path.name}, the newest one that is whole"
            if point and point.path
            else f"no other one is whole: {_new_run(saved)}"
        )
        raise ConfigError(f"the checkpoint {newest} is damaged ({problem})", key="resume", hint=remedy)
    if not point and _had_checkpoint(saved):
        problem = "the run has saved checkpoints, and none is left to go on from"
        raise ConfigError(problem, key="resume", value=run_dir, hint=_new_run(saved))
    return point or ResumePoint()


def _had_checkpoint(run: SavedRun) -> bool:
    """Whether the run recorded a whole checkpoint: its summary, a step after it or a resume from it."""
    saved = run.finished_steps or run.summary.get("checkpoint") or any(one.step for one in run.sessions)
    return bool(saved) or any("time/checkpoint" in row for row in run.metrics)


def _new_run(run: SavedRun) -> str:
    model = shlex.quote(f"model={run.dir.model}")
    return "start a new run" + (f" from its final model with {model}" if run.dir.model.is_dir() else "")


def _aside(path: Path) -> Path:
    return path.with_name(f"damaged_{path.name}")


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).name} is missing"
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
