"""The data of a live page: the runs below some folders.

Nothing is read unless a page asks, and then only if the sizes and times of files have changed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpocli.errors import GrpoError
from grpocli.runs.saved_run import SavedRun, run_folders
from grpocli.version import __version__
from grpocli_tools.report.page_data import PageData
from grpocli_tools.report.rollout_sample import read_step

SHARE = 50
"""Looking that took t seconds is not repeated for SHARE * t seconds: it takes at most 2 % of a core."""
LEAST_WAIT, MOST_WAIT = 0.5, 60.0
"""Seconds after which it is repeated at the earliest and at the latest."""


@dataclass
class LiveData:
    """The page of the runs below `folders`, built again when it is asked for and files have changed."""

    folders: Sequence[Path]
    load: Callable[[Sequence[Path]], PageData]
    """The page of some run folders."""
    clock: Callable[[], float] = time.monotonic
    page: PageData | None = None
    tag: str = ""
    """Changes with the page."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.names: dict[Path, str] = {}
        self.signature: Any = None
        self.next_look = float("-inf")

    def newer(self, known: str = "") -> dict[str, Any] | None:
        """The whole page with its tag; None if `known` is the tag."""
        page = self._current()
        if known == self.tag:
            return None
        return {name: getattr(page, name) for name in PageData.__slots__} | {"live": "", "tag": self.tag}

    def rollouts(self, run: str, step: int) -> dict[str, Any] | None:
        """The prompts and groups of a step; None if the page has no such run or step."""
        runs = {view.id: view for view in self.page.runs} if self.page else {}
        if run not in runs or step not in runs[run].rollouts.steps:
            return None
        return read_step(Path(runs[run].path), step)

    def _current(self) -> PageData:
        with self.lock:
            if self.page is None or self.clock() >= self.next_look:
                began, is_first = self.clock(), self.page is None
                self._look()
                now = self.clock()
                took = 0.0 if is_first else now - began  # the first time libraries are loaded, too
                self.next_look = now + min(max(LEAST_WAIT, SHARE * took), MOST_WAIT)
            assert self.page is not None
            return self.page

    def _look(self) -> None:
        """Build the page again if a file has changed."""
        paths = [path for folder in self.folders if folder.is_dir() for path in sorted(run_folders(folder))]
        signature = [(path, *_signature(path)) for path in paths]  # before anything is read
        if signature == self.signature or (page := self._built(paths)) is None:
            return
        self.signature = signature
        if self.page is None or replace(page, made=self.page.made) != self.page:  # half a line changes nothing
            self.page, self.tag = page, secrets.token_hex(8)

    def _built(self, paths: Sequence[Path]) -> PageData | None:
        """The page of these runs, with a note for each that was deleted; None if one disappeared meanwhile."""
        gone = [name for path, name in self.names.items() if not path.is_dir()]
        notes = [f"{name}: its folder is not there any more" for name in gone]
        if not paths:
            watched = ", ".join(map(str, self.folders))
            return PageData("No run yet", "", __version__, [], [], notes=[*notes, f"waiting for a run in {watched}"])
        try:
            page = self.load(paths)
        except (GrpoError, OSError):
            if self.page is None:
                raise
            return None
        self.names |= {Path(run.path): run.name for run in page.runs}
        names = ", ".join(folder.resolve().name for folder in self.folders)
        title = page.title if len(paths) == 1 else f"{len(paths)} runs in {names}"
        return replace(page, title=title, notes=[*notes, *page.notes])


def _signature(path: Path) -> tuple[Any, ...]:
    """Changes when a run does a step, begins, ends, or is killed."""
    run = SavedRun(path).dir
    times = []
    for file in (run.config, run.metrics, run.summary, run.sessions, run.rollouts(0).parent):
        try:
            found = file.stat()
            times.append((found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError:
            times.append((0, 0, 0))
    return (*times, run.is_running())
