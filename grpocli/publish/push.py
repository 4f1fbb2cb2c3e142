"""`hub.push` and `grpocli push`: a run's folder as a model repository on the hub, at the end or while the run goes on.

The final model is at the repository's root, where transformers looks for it; everything else has the path that it has
in the run's folder, so that a download of the repository can be resumed. Texts are pushed without secrets and the home
folder (publish/published.py). A failed push never fails the run.
"""

from __future__ import annotations

import logging
import shlex
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.composition.compose import register_parts
from grpocli.errors import ConfigError
from grpocli.hub import PUSH_KEY, check_may_push, hub_api, hub_errors
from grpocli.plugins import hook
from grpocli.processes.threads import run_in_thread
from grpocli.progress import Progress, unreported
from grpocli.publish.published import HERE, Publisher
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun

if TYPE_CHECKING:
    from grpocli.config.schema import Hub
    from grpocli.views.view import View

logger = logging.getLogger(__name__)

Files = Mapping[str, Path | bytes]
"""{path in the repository: a file of this machine, or bytes}."""
TEXTS = ("config.yaml", "sessions.jsonl", "metrics.jsonl", "summary.json")
"""The files of a run, beside its folders, that are pushed."""
CARD = "README.md"
NEW = {".gitattributes", CARD}
"""The files that the hub makes itself in a new repository."""
COMMIT_FILES = 100
"""Most files of a commit; the hub advises no more."""


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
        register_parts()  # which know the keys of a config that hold no secrets
        return Publisher.of_run(self.run_dir.path)

    def push(self, progress: Progress = unreported) -> str:
        """Push everything that `hub` asks for and that the repository lacks. Returns the repository's address.

        Safe to repeat: files that are there already are not sent again. Raises ConfigError, in one sentence.
        """
        found = _files(self.run_dir.rollouts(0).parent, "rollouts/") if self.hub.rollouts else {}
        files = [*found.items()]
        commits: list[Files] = [dict(files[n : n + COMMIT_FILES]) for n in range(0, len(files), COMMIT_FILES)]
        commits += [self._checkpoint(path) for path in (self._kept() if self.hub.checkpoints else ())]
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

    def push_checkpoint(self, step: int) -> None:
        """Push a checkpoint, with the texts that a resume needs; delete those that the run has deleted."""
        with hub_errors(self.key, self.repo):
            folder = self.run_dir.checkpoint(step)
            self._commit(f"grpocli: {folder.name}", self._checkpoint(folder), self._gone())

    def _text(self, file: Path) -> Path | bytes:
        """A file as a public text; if that changes nothing, the file itself."""
        text = file.read_text(errors="replace")
        public = self.public(text)
        return file if public == text else public.encode()

    def _checkpoint(self, folder: Path) -> Files:
        return _files(folder, f"checkpoints/{folder.name}/")

    def _model(self) -> Files:
        """The final model with its card, and the report; nothing before the run has a model."""
        model = self.run_dir.model
        if not (files := _files(model)):
            return {}
        card = self.public((model / CARD).read_text()) if CARD in files else ""
        files[CARD] = card.replace(HERE, self.repo).encode()
        if made_page := hook("report_page"):
            ended = self.run_dir.summary if self.run_dir.summary.is_file() else self.run_dir.config
            # the date of the run's end, so that a repeated push has the same page
            made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ended.stat().st_mtime))
            files["report.html"] = self.public(made_page([self.run_dir.path], made=made)).encode()
        return files

    def _commit(self, message: str, files: Files, gone: Sequence[str] = ()) -> None:
        """Commit files with the run's texts, and delete checkpoints."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        # rollouts belong to this model: they are no data set of their own
        warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
        texts = {name: self._text(file) for name in TEXTS if (file := self.run_dir.path / name).is_file()}
        added = [CommitOperationAdd(*one) for one in {**texts, **files}.items()]
        deleted = [CommitOperationDelete(f"checkpoints/{name}/", is_folder=True) for name in gone]
        self.api.create_commit(self.repo, [*added, *deleted], commit_message=message, revision=self.hub.revision)

    def _gone(self) -> list[str]:
        """The pushed checkpoints that the run has deleted; none if it has no checkpoint at all."""
        kept = {path.name for path in (self._kept() if self.hub.checkpoints else ())}
        there = self.api.list_repo_files(self.repo, revision=self.hub.revision) if kept else []
        return sorted({path.split("/")[1] for path in there if path.startswith("checkpoints/")} - kept)

    def _kept(self) -> list[Path]:
        """The run's checkpoints. Imported here, as torch comes with them."""
        from grpocli.training.checkpoint import checkpoints

        return checkpoints(self.run_dir.checkpoints)


def _files(folder: Path, below: str = "") -> dict[str, Path | bytes]:
    """{path in the repository: file} of a folder, without hidden ones. below: begins these paths."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {f"{below}{path.relative_to(folder).as_posix()}": path for path in paths}


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
    """Pushes checkpoints in a thread while the run goes on. A failure is a warning.

    A checkpoint that is saved during a push is left to a later one.
    """

    def __init__(self, pusher: Pusher, warn: Callable[[str], None]) -> None:
        self._pusher, self._warn = pusher, warn
        self._pushing: Future[None] | None = None
        self._saved = self._pushed = 0
        self._failed = False

    def add(self, step: int) -> None:
        """Push the checkpoint after a step, which is whole."""
        self._saved = step
        if self._pushing is None or self._pushing.done():
            self._pushing = run_in_thread(lambda: self._push(step), "push")

    def close(self, timeout: float) -> None:
        """Wait until the last checkpoint is pushed, at most `timeout` seconds."""
        end = time.monotonic() + timeout
        if self._pushing and wait([self._pushing], timeout).done and self._pushed < self._saved:
            self.add(self._saved)
        if self._pushing and wait([self._pushing], max(0.0, end - time.monotonic())).not_done:
            self._warn(f"the last checkpoint is not pushed yet: {self._remedy()}")

    def _push(self, step: int) -> None:
        try:
            self._pusher.push_checkpoint(step)
            self._pushed = step
            logger.info("pushed the checkpoint of step %d", step)
        except Exception as error:
            logger.exception("the checkpoint of step %d was not pushed", step)
            if not self._failed and self._pusher.run_dir.checkpoint(step).is_dir():  # otherwise the run has deleted it
                self._warn(f"the checkpoint of step {step} is not pushed: {error}; {self._remedy()}")
                self._failed = True

    def _remedy(self) -> str:
        return f"the run goes on, and later pushes it with: {push_command(self._pusher.run_dir)}"


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
        why = str(error)
    else:
        logger.info("pushed to %s", pushing.result())
        view.note(f"pushed to {pushing.result()}")
        return
    view.warn(f"not pushed: {why}; the run is whole, push it with: {push_command(run_dir)}")


def push_command(run_dir: RunDir) -> str:
    """The command that pushes a run as its config asks."""
    return f"grpocli push {shlex.quote(str(run_dir.path))}"
