"""`hub.push` and `grpocli push`: a run's folder as a model repository on the hub, at the end or while the run goes on.

The final model is at the repository's root, where transformers looks for it; everything else has the path that it has
in the run's folder, so that `resume=hub:OWNER/NAME` finds a run. A push uploads only what the repository lacks. Texts
are pushed without secrets and local folders (publish/published.py). A failed push never fails the run.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import xxhash

from grpocli.composition.compose import register_parts
from grpocli.errors import ConfigError, GrpoError
from grpocli.files import QuietFileHandler
from grpocli.hub import PUSH_KEY, check_may_push, hub_api, hub_errors
from grpocli.plugins import hook
from grpocli.processes.threads import run_in_thread
from grpocli.progress import Progress, unreported
from grpocli.publish.published import Publisher
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun

if TYPE_CHECKING:
    from grpocli.config.schema import Hub
    from grpocli.views.view import View

logger = logging.getLogger(__name__)

TEXTS = ("config.yaml", "sessions.jsonl", "metrics.jsonl", "summary.json")
"""The files of a run, beside its folders, that are pushed."""
CARD = "README.md"
NEW = {".gitattributes", CARD}
"""The files that the hub makes itself in a new repository."""
CHECKSUMS = "checksums.json"
REPORT = "report.html"
COMMIT_FILES = 100
"""Most files of a commit; the hub advises no more."""
HERE = "PATH_TO_THIS_FOLDER"
"""Stands in the model card for the model's folder."""


@dataclass(frozen=True, slots=True)
class Content:
    """The file `path` of the repository: a file of this machine, or bytes."""

    path: str
    source: Path | bytes


@dataclass(frozen=True)
class Pusher:
    """Pushes a run's folder to `hub.push`."""

    run_dir: RunDir
    hub: Hub
    key: str = PUSH_KEY
    """The key of errors."""
    api: Any = field(default_factory=hub_api)

    @property
    def repo(self) -> str:
        assert self.hub.push is not None
        return self.hub.push

    @cached_property
    def public(self) -> Publisher:
        """Makes a text public."""
        return Publisher.of_run(self.run_dir.path)

    def push(self, progress: Progress = unreported) -> str:
        """Push everything that `hub` asks for and that the repository lacks. Returns the repository's address.

        Safe to repeat: files that are there already are not sent again. Raises ConfigError, in one sentence.
        """
        register_parts()  # which know the keys of a config that hold no secrets
        found = _files(self.run_dir.rollouts(0).parent, "rollouts") if self.hub.rollouts else {}
        files = [Content(*one) for one in found.items()]
        commits = [files[start : start + COMMIT_FILES] for start in range(0, len(files), COMMIT_FILES)]
        commits += [self._checkpoint(path, path.name) for path in (self._kept() if self.hub.checkpoints else ())]
        commits.append(self._model())
        if not any(commits):
            raise ConfigError("has neither a final model nor a checkpoint yet", key="RUN", value=self.run_dir.path)
        check_may_push(self.key, self.repo, self.hub.revision, private=self.hub.private)
        refuse_other_run(self.key, self.hub, self.run_dir)
        with hub_errors(self.key, self.repo):
            for done, contents in enumerate(commits):
                progress(done, len(commits), "parts")
                self._commit(f"grpocli: {self.run_dir.name}", contents)
        return f"{self.api.endpoint}/{self.repo}"

    def push_checkpoint(self, folder: Path, step: int) -> None:
        """Push a checkpoint, with the texts that a resume needs, and delete those that the run has deleted.

        folder: the checkpoint, or a copy of it.
        """
        with hub_errors(self.key, self.repo):
            name = self.run_dir.checkpoint(step).name
            files = self.api.list_repo_files(self.repo, revision=self.hub.revision)
            pushed = {path.split("/")[1] for path in files if path.startswith("checkpoints/")}
            gone = sorted(pushed - {path.name for path in self._kept()})
            self._commit(f"grpocli: {name}", self._checkpoint(folder, name), gone)

    def _text(self, path: str, file: Path) -> Content:
        """A file as a public text; if that changes nothing, the file itself."""
        text = file.read_text(errors="replace")
        return Content(path, file if self.public(text) == text else self.public(text).encode())

    def _public_files(self, folder: Path, below: str) -> list[Content]:
        """The files of a folder. Configs have no local folders: peft writes that of an adapter's base model."""
        files = _files(folder, below).items()
        return [self._text(*one) if one[0].endswith("config.json") else Content(*one) for one in files]

    def _checkpoint(self, folder: Path, name: str) -> list[Content]:
        """The files of a checkpoint. Configs without local folders get their own checksums, which a resume checks."""
        below = f"checkpoints/{name}"
        contents, index = self._public_files(folder, below), folder / CHECKSUMS
        changed = {one.path.removeprefix(f"{below}/"): one.source for one in contents if isinstance(one.source, bytes)}
        if not changed or not index.is_file():
            return contents
        sums = {file: [len(data), xxhash.xxh3_128(data).hexdigest()] for file, data in changed.items()}
        whole = json.dumps(json.loads(index.read_text()) | sums, indent=2).encode()
        kept = [one for one in contents if one.source != index]
        return [*kept, Content(f"{below}/{CHECKSUMS}", whole)]

    def _model(self) -> list[Content]:
        """The final model with its card, and the report; nothing before the run has a model."""
        model = self.run_dir.model
        if not model.is_dir():
            return []
        card = (model / CARD).read_text() if (model / CARD).is_file() else ""
        files = [content for content in self._public_files(model, "") if content.path != CARD]
        files.append(Content(CARD, self.public(card).replace(HERE, self.repo).encode()))
        if made_page := hook("report_page"):
            ended = self.run_dir.summary if self.run_dir.summary.is_file() else self.run_dir.config
            # the date of the run's end, so that a repeated push has the same page
            made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ended.stat().st_mtime))
            files.append(Content(REPORT, self.public(made_page([self.run_dir.path], made=made)).encode()))
        return files

    def _commit(self, message: str, contents: Sequence[Content], gone: Sequence[str] = ()) -> None:
        """Commit files with the run's texts, and delete checkpoints."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        # rollouts belong to this model: they are no data set of their own
        warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
        texts = [self._text(name, self.run_dir.path / name) for name in TEXTS if (self.run_dir.path / name).is_file()]
        added = [CommitOperationAdd(one.path, one.source) for one in (*texts, *contents)]
        deleted = [CommitOperationDelete(f"checkpoints/{name}/", is_folder=True) for name in gone]
        self.api.create_commit(self.repo, [*added, *deleted], commit_message=message, revision=self.hub.revision)

    def _kept(self) -> list[Path]:
        """The run's checkpoints. Imported here, as torch comes with them."""
        from grpocli.training.checkpoint import checkpoints

        return checkpoints(self.run_dir.checkpoints)


def _files(folder: Path, below: str) -> dict[str, Path]:
    """{path in the repository: file} of a folder, without hidden ones. below: its own path there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {(PurePosixPath(below) / path.relative_to(folder)).as_posix(): path for path in paths}


def refuse_other_run(key: str, hub: Hub, run_dir: RunDir) -> None:
    """Raise ConfigError if the repository holds another run or a model, whose files would mix with this run's.

    Also if the hub does not say what it holds.
    """
    if hub.push is None:
        return
    from huggingface_hub import hf_hub_download

    hint = "choose another name, or a new branch with hub.revision=BRANCH"
    with hub_errors(key, hub.push):
        files = set(hub_api().list_repo_files(hub.push, revision=hub.revision))
        if run_dir.sessions.name not in files:
            if files - NEW:
                raise ConfigError("holds files that are no run of grpocli", key=key, value=hub.push, hint=hint)
            return
        sessions = hf_hub_download(hub.push, run_dir.sessions.name, revision=hub.revision)
        if SavedRun(Path(sessions).parent).id != SavedRun(run_dir.path).id:
            raise ConfigError("holds another run", key=key, value=hub.push, hint=hint)


class CheckpointPushes:
    """Pushes checkpoints in a thread, one after another, while the run goes on. A failure is a warning.

    Of several that wait, only the newest is pushed.
    """

    def __init__(self, pusher: Pusher, warn: Callable[[str], None]) -> None:
        self._pusher, self._warn = pusher, warn
        self._lock = threading.Lock()
        self._due = 0
        self._pushing: Future[None] | None = None
        self._failed = False

    def add(self, step: int) -> None:
        """Push the checkpoint after a step, which is whole."""
        with self._lock:
            self._due = step
            if self._pushing is None:
                self._pushing = run_in_thread(self._work, "push")

    def close(self, timeout: float) -> None:
        """Wait for the pushes, at most `timeout` seconds."""
        if (pushing := self._pushing) and not wait([pushing], timeout).done:
            self._warn(f"the last checkpoint is not pushed yet: {self._remedy()}")

    def _work(self) -> None:
        while True:
            with self._lock:
                step, self._due = self._due, 0
                if not step:
                    self._pushing = None
                    return
            checkpoint = self._pusher.run_dir.checkpoint(step)
            try:
                with _linked(checkpoint) as folder:
                    self._pusher.push_checkpoint(folder, step)
                logger.info("pushed the checkpoint of step %d", step)
            except Exception as error:
                logger.exception("the checkpoint of step %d was not pushed", step)
                if not self._failed and checkpoint.is_dir():  # otherwise the run has deleted it
                    self._warn(f"the checkpoint of step {step} is not pushed: {reason(error)}; {self._remedy()}")
                    self._failed = True

    def _remedy(self) -> str:
        return f"the run goes on, and later pushes it with: {push_command(self._pusher.run_dir, self._pusher.hub)}"


@contextmanager
def _linked(checkpoint: Path) -> Iterator[Path]:
    """A copy of a checkpoint by hard links, as the run may delete it meanwhile; the checkpoint itself without them."""
    with tempfile.TemporaryDirectory(prefix=".tmp-push-", dir=checkpoint.parent) as folder:
        copy = Path(folder, checkpoint.name)
        try:
            shutil.copytree(checkpoint, copy, copy_function=os.link)
        except OSError as error:  # shutil.Error, too
            if not checkpoint.is_dir():  # the run has deleted it
                raise
            logger.info("%s is pushed from its own folder, as it cannot be linked: %s", checkpoint.name, error)
            copy = checkpoint
        yield copy


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
