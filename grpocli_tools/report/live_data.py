"""The data of a live page: the runs below some folders, and what is new in them.

Nothing is read unless a page asks. Of metrics.jsonl only appended lines are read. The rest of a page (verdicts,
warnings, tables) is built again when something changed, as often as a `Budget` allows.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpocli.errors import GrpoError
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun, run_folders
from grpocli.version import __version__
from grpocli_tools.report.curves import metrics_row
from grpocli_tools.report.page_data import PageData, RunView, Series

MetricsRow = dict[str, Any]
LoadPage = Callable[[Sequence[Path]], PageData]
LoadStep = Callable[[Path, int], dict[str, Any]]
NewValues = Callable[[Path, Sequence[MetricsRow]], tuple[list[int], dict[str, Series]]]

SHARE = 300
"""Work that took t seconds is not repeated for SHARE * t seconds: it takes at most a third of a percent of a core."""
MOST_WAIT = 60.0
"""Seconds after which work is repeated, however long it took."""
FACTS = ("verdict", "warnings", "facts", "total_steps", "sessions", "starts", "notice", "resume")
"""The fields of a run that a new build may change without a new page."""


class Budget:
    """Limits how often some work is done: afterwards it rests for SHARE times the time it took, MOST_WAIT at most."""

    def __init__(self, least: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.least, self.clock = least, clock
        self.next = float("-inf")

    def __enter__(self) -> None:
        self.start = self.clock()

    def __exit__(self, *error: object) -> None:
        now = self.clock()
        self.next = now + min(max(self.least, SHARE * (now - self.start)), MOST_WAIT)

    def allows(self) -> bool:
        return self.clock() >= self.next


class MetricsTail:
    """The lines that are appended to a metrics.jsonl. A line without its end is left for the next read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: tuple[int, int] | None = None
        self.offset = 0
        if found := self._stat():
            self.identity = (found.st_dev, found.st_ino)
            self.offset = path.read_bytes().rfind(b"\n") + 1

    def is_cut_back(self) -> bool:
        """Whether the file was replaced, deleted or cut back, as by a resume. Reads nothing."""
        return self._is_other(self._stat())

    def read(self) -> list[MetricsRow] | None:
        """New rows; broken lines are left out. None if the file was cut back."""
        found = self._stat()
        if self._is_other(found):
            return None
        if found is None or found.st_size == self.offset:
            return []
        self.identity = (found.st_dev, found.st_ino)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self.offset += whole
        return [row for line in text[:whole].split(b"\n") if (row := metrics_row(line)) is not None]

    def _stat(self) -> os.stat_result | None:
        try:
            return self.path.stat()
        except OSError:
            return None

    def _is_other(self, found: os.stat_result | None) -> bool:
        if found is None or self.identity is None:
            return self.identity is not None
        return (found.st_dev, found.st_ino) != self.identity or found.st_size < self.offset


@dataclass(slots=True)
class LiveRun:
    """A run on the page. signature: of its other files, which a new build reads."""

    path: Path
    view: RunView
    tail: MetricsTail
    signature: tuple[Any, ...]
    rollouts: Any = None


@dataclass(frozen=True, slots=True)
class Change:
    """A change since the page was loaded. start: the number of steps before new ones; None if only facts changed."""

    run: str
    start: int | None


@dataclass
class LiveData:
    """The page of the runs below `folders`, kept up to date when it is asked for.

    load: the page of some run folders. new_values: the steps and values of new rows. load_step: the rollouts of a step.
    """

    folders: Sequence[Path]
    load: LoadPage
    new_values: NewValues
    load_step: LoadStep
    scans: Budget = field(default_factory=lambda: Budget(0.5))
    builds: Budget = field(default_factory=lambda: Budget(2.0))

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.runs: dict[str, LiveRun] = {}
        self.deleted: dict[Path, str] = {}
        self.page: PageData | None = None
        self.changes: list[Change] = []
        self.epoch = ""
        self.dirty = True

    def whole(self) -> dict[str, Any]:
        """The whole page with its cursor."""
        with self.lock:
            self._update()
            assert self.page is not None
            page = {name: getattr(self.page, name) for name in PageData.__slots__}
            runs = [_with_copies(view) for view in self.page.runs]
            return page | {"runs": runs, "live": "", "cursor": self._cursor()}

    def since(self, cursor: str) -> dict[str, Any] | None:
        """What is new since a cursor; None if nothing is. `reload` asks for the whole page."""
        with self.lock:
            self._update()
            epoch, _, number = cursor.partition("-")
            known = int(number) if number.isdecimal() else -1
            if epoch != self.epoch or not 0 <= known <= len(self.changes):
                return {"reload": True}
            changes = self.changes[known:]
            if not changes:
                return None
            assert self.page is not None
            runs = {id: self._news(id, changes) for id in dict.fromkeys(change.run for change in changes)}
            return {"cursor": self._cursor(), "runs": runs, "results": self.page.results}

    def rollouts(self, run: str, step: int) -> dict[str, Any] | None:
        """The prompts and groups of a step; None if the page has no such run or step."""
        with self.lock:
            found = self.runs.get(run)
            if found is None or step not in found.view.rollouts.steps:
                return None
        return self.load_step(found.path, step)

    def _cursor(self) -> str:
        return f"{self.epoch}-{len(self.changes)}"

    def _news(self, id: str, changes: Sequence[Change]) -> dict[str, Any]:
        view = self.runs[id].view
        starts = [change.start for change in changes if change.run == id and change.start is not None]
        start = min(starts, default=len(view.steps))
        news = {name: getattr(view, name) for name in ("state", *FACTS)}
        metrics = {name: values[start:] for name, values in view.metrics.items()}
        return news | {
            "rollouts": {"steps": list(view.rollouts.steps)},
            "steps": view.steps[start:],
            "metrics": {name: values for name, values in metrics.items() if any(v is not None for v in values)},
        }

    def _update(self) -> None:
        """Look at the files, unless that was a moment ago. Builds the page anew if more than new steps changed."""
        if self.page is None:
            self._build()
        elif self.scans.allows():
            with self.scans:
                self._scan()
            if self.dirty and self.builds.allows():
                self._build()

    def _scan(self) -> None:
        if self._found() != [run.path for run in self.runs.values()]:
            self.dirty = True
        for id, run in self.runs.items():
            if (signature := _signature(run.path)) != run.signature:
                run.signature, self.dirty = signature, True
            self._read_rollout_steps(id, run)
            rows = run.tail.read()
            if rows is None:
                self.dirty = True
            elif rows:
                self._append(id, run, rows)

    def _append(self, id: str, run: LiveRun, rows: Sequence[MetricsRow]) -> None:
        view, start = run.view, len(run.view.steps)
        last = view.steps[-1] if view.steps else -1
        steps, metrics = self.new_values(run.path, [row for row in rows if row["step"] > last])
        if not steps:
            return
        view.steps.extend(steps)
        for name, values in metrics.items():
            view.metrics.setdefault(name, [None] * start).extend(values)
        for values in view.metrics.values():
            values.extend([None] * (len(view.steps) - len(values)))
        self.changes.append(Change(id, start))
        self.dirty = True  # verdict and warnings depend on the new steps

    def _read_rollout_steps(self, id: str, run: LiveRun) -> None:
        folder = run.path / "rollouts"
        try:
            seen = folder.stat().st_mtime_ns
        except OSError:
            seen = 0
        if seen == run.rollouts:
            return
        first, run.rollouts = run.rollouts is None, seen
        steps = list(SavedRun(run.path).rollout_files)
        if steps != run.view.rollouts.steps:
            run.view.rollouts.steps[:] = steps
            if not first:
                self.changes.append(Change(id, None))

    def _found(self) -> list[Path]:
        """The run folders below the watched ones."""
        paths = {
            path.resolve(): path for folder in self.folders if folder.is_dir() for path in sorted(run_folders(folder))
        }
        return list(paths.values())

    def _build(self) -> None:
        with self.builds:
            paths = self._found()
            runs = {path: (MetricsTail(RunDir(path).metrics), _signature(path)) for path in paths}
            page = self._loaded(paths)
            if page is None:
                return
            self.dirty = False
            is_cut_back = any(run.tail.is_cut_back() for run in self.runs.values())
            if self.page is not None and _shape(page) == _shape(self.page) and not is_cut_back:
                self._take_facts(page)
            else:
                self._take(page, runs)

    def _loaded(self, paths: Sequence[Path]) -> PageData | None:
        """The page of these runs; None if a run disappeared while it was read."""
        gone = [run for run in self.runs.values() if run.path not in paths]
        self.deleted |= {run.path: f"{run.view.name}: its folder is not there any more" for run in gone}
        for path in paths:
            self.deleted.pop(path, None)
        notes = list(self.deleted.values())
        if not paths:
            watched = ", ".join(map(str, self.folders))
            return PageData("No run yet", "", __version__, [], [], notes=[*notes, f"waiting for a run in {watched}"])
        try:
            page = self.load(paths)
        except (GrpoError, OSError):
            if self.page is None:
                raise
            return None
        names = ", ".join(folder.resolve().name for folder in self.folders)
        title = page.title if len(paths) == 1 else f"{len(paths)} runs in {names}"
        return replace(page, title=title, notes=[*notes, *page.notes])

    def _take_facts(self, page: PageData) -> None:
        """Replace everything but the curves, which have grown by their new steps."""
        assert self.page is not None
        views = []
        for old, new in zip(self.page.runs, page.runs, strict=True):
            view = replace(new, steps=old.steps, metrics=old.metrics, thinning=old.thinning, rollouts=old.rollouts)
            if any(getattr(old, name) != getattr(new, name) for name in FACTS):
                self.changes.append(Change(new.id, None))
            self.runs[new.id].view = view
            views.append(view)
        self.page = replace(page, runs=views)

    def _take(self, page: PageData, runs: dict[Path, tuple[MetricsTail, tuple[Any, ...]]]) -> None:
        self.page, self.changes, self.epoch = page, [], secrets.token_hex(8)
        found = zip(page.runs, runs.items(), strict=True)
        self.runs = {view.id: LiveRun(path, view, *read) for view, (path, read) in found}
        for id, run in self.runs.items():
            self._read_rollout_steps(id, run)


def _shape(page: PageData) -> Any:
    """What a page can change only by a reload."""
    names = [(run.id, run.path, run.name, run.label, run.group, run.state) for run in page.runs]
    return names, page.charts, page.notes, page.differences


def _signature(run: Path) -> tuple[Any, ...]:
    """Changes when a run begins, ends, or is killed."""
    times = []
    for name in ("config.yaml", "summary.json", "sessions.jsonl"):
        try:
            found = (run / name).stat()
            times.append((found.st_mtime_ns, found.st_size))
        except OSError:
            times.append((0, 0))
    return (*times, RunDir(run).is_running())


def _with_copies(view: RunView) -> RunView:
    """A run whose lists do not grow while they are sent."""
    metrics = {name: list(values) for name, values in view.metrics.items()}
    rollouts = replace(view.rollouts, rule="", steps=list(view.rollouts.steps))
    return replace(view, steps=list(view.steps), metrics=metrics, rollouts=rollouts)
